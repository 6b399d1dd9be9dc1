//! The Vulkan loader, and an instance made through it.

use std::ffi::CStr;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ash::vk;

use super::choose::{self, Identity, Uuid};
use crate::error::{Error, ErrorKind, Result, chain};
use crate::sys::process::Owner;

/// The opened loader library.
#[derive(Clone)]
pub(super) struct Loader {
    entry: ash::Entry,
}

/// What a driver has to bring for memory to be shared. Part of Vulkan 1.1, and still listed: the loader lists it only if
/// it found a driver that has it.
const SHARING: &CStr = ash::khr::external_memory_capabilities::NAME;

impl Loader {
    /// Opens the loader and has it look for drivers, without making an instance, which takes half a second.
    pub(super) fn open() -> Result<Self> {
        let mut kept = kept();
        if let Some(loader) = &kept.loader {
            return Ok(loader.clone());
        }
        let loader = Self::load()?;
        kept.loader = Some(loader.clone());
        Ok(loader)
    }

    fn load() -> Result<Self> {
        // SAFETY: loading the Vulkan loader runs its initialisers, which have no requirements.
        let entry = unsafe { ash::Entry::load() }.map_err(|error| {
            let error = chain(&error);
            Error::new("open", ErrorKind::NoDriver, format!("libvulkan.so.1 cannot be loaded: {error}"))
                .remedy("install the Vulkan loader (Debian: libvulkan1)")
        })?;
        // SAFETY: the loader's functions are as Vulkan specifies; this holds for every call in this file.
        let version = unsafe { entry.try_enumerate_instance_version() };
        if !matches!(version, Ok(Some(version)) if version >= vk::API_VERSION_1_1) {
            return Err(Error::new("open", ErrorKind::NoDriver, "libvulkan.so.1 is a loader of Vulkan 1.0")
                .remedy("update the Vulkan loader to 1.1 or newer"));
        }
        // SAFETY: as above.
        let extensions = unsafe { entry.enumerate_instance_extension_properties(None) };
        // A loader without drivers lists what it does by itself, or fails.
        let extensions = extensions.unwrap_or_default();
        if !extensions.iter().any(|extension| extension.extension_name_as_c_str() == Ok(SHARING)) {
            return Err(no_icd());
        }
        Ok(Self { entry })
    }
}

fn no_icd() -> Error {
    Error::new("open", ErrorKind::NoDriver, "the Vulkan loader finds no driver (ICD) that can share memory").remedy(
        "give the container the graphics capability (NVIDIA_DRIVER_CAPABILITIES=all), install the NVIDIA driver's \
         Vulkan libraries, or name its manifest in VK_DRIVER_FILES",
    )
}

impl fmt::Debug for Loader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Loader(libvulkan.so.1)")
    }
}

/// What a Vulkan call said, as an error with the kind that fits it.
#[cold]
pub(super) fn failed(op: &'static str, call: &'static str, result: vk::Result) -> Error {
    let kind = match result {
        vk::Result::ERROR_OUT_OF_HOST_MEMORY | vk::Result::ERROR_OUT_OF_DEVICE_MEMORY => ErrorKind::OutOfMemory,
        vk::Result::ERROR_INCOMPATIBLE_DRIVER => ErrorKind::NoDriver,
        _ => ErrorKind::Io(libc::EIO),
    };
    Error::new(op, kind, format!("{call} returned {result:?}"))
}

/// An instance, destroyed on drop.
pub(super) struct Instance {
    pub(super) raw: ash::Instance,
    /// Keeps the functions loaded.
    _loader: Loader,
}

/// What a process keeps once it has it: drivers that are loaded and unloaded again and again stop loading, for each time
/// takes more of the little room that the C library has for thread-local data.
#[derive(Default)]
struct Kept {
    loader: Option<Loader>,
    /// Of the process that made it; a child makes its own.
    instance: Option<(Owner, Arc<Instance>)>,
}

fn kept() -> MutexGuard<'static, Kept> {
    static KEPT: Mutex<Kept> = Mutex::new(Kept { loader: None, instance: None });
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Instance {
    /// The process's instance, made when first asked for.
    pub(super) fn shared(loader: &Loader) -> Result<Arc<Self>> {
        let mut kept = kept();
        if let Some((owner, instance)) = &kept.instance
            && owner.is_here()
        {
            return Ok(Arc::clone(instance));
        }
        let instance = Self::new(loader)?;
        if let Some(of_parent) = kept.instance.replace((Owner::here(), Arc::clone(&instance))) {
            std::mem::forget(of_parent);
        }
        Ok(instance)
    }

    pub(super) fn new(loader: &Loader) -> Result<Arc<Self>> {
        let application = vk::ApplicationInfo::default().application_name(c"gdrcopy").api_version(vk::API_VERSION_1_1);
        let info = vk::InstanceCreateInfo::default().application_info(&application);
        // SAFETY: `info` and what it refers to outlive the call; the loader stays loaded while the instance lives.
        let raw = unsafe { loader.entry.create_instance(&info, None) }.map_err(|result| match result {
            vk::Result::ERROR_INCOMPATIBLE_DRIVER => no_icd(),
            result => failed("open GPU", "vkCreateInstance", result),
        })?;
        Ok(Arc::new(Self { raw, _loader: loader.clone() }))
    }

    /// The devices, each with what identifies it.
    pub(super) fn devices(&self) -> Result<Vec<(vk::PhysicalDevice, Identity)>> {
        // SAFETY: the instance lives.
        let found = unsafe { self.raw.enumerate_physical_devices() };
        let found = found.map_err(|result| failed("open GPU", "vkEnumeratePhysicalDevices", result))?;
        Ok(found.into_iter().map(|device| (device, self.identity(device))).collect())
    }

    fn identity(&self, device: vk::PhysicalDevice) -> Identity {
        // SAFETY: the device is one of this instance.
        let plain = unsafe { self.raw.get_physical_device_properties(device) };
        let mut uuid = [0; 16];
        // Only a device of 1.1 has to know the structure.
        if plain.api_version >= vk::API_VERSION_1_1 {
            let mut id = vk::PhysicalDeviceIDProperties::default();
            let mut properties = vk::PhysicalDeviceProperties2::default().push_next(&mut id);
            // SAFETY: as above; the chain outlives the call.
            unsafe { self.raw.get_physical_device_properties2(device, &mut properties) };
            uuid = id.device_uuid;
        }
        let name = plain.device_name_as_c_str().unwrap_or_default().to_string_lossy().into_owned();
        Identity { name, uuid, version: plain.api_version }
    }

    /// The device with this UUID, and its name.
    pub(super) fn device(&self, uuid: Uuid) -> Result<(vk::PhysicalDevice, String)> {
        let (devices, identities): (Vec<_>, Vec<_>) = self.devices()?.into_iter().unzip();
        let at = choose::device(&identities, uuid)?;
        Ok((devices[at], identities[at].name.clone()))
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        // SAFETY: what was made from the instance holds it, so nothing is left of it.
        unsafe { self.raw.destroy_instance(None) };
    }
}

impl fmt::Debug for Instance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Instance").field(&self.raw.handle()).finish()
    }
}
