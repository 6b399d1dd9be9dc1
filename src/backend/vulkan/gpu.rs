//! A logical device of Vulkan: what is needed to import memory and to map it.

use std::ffi::CStr;
use std::fmt;
use std::sync::Arc;

use ash::vk;

use super::choose::{self, Visible};
use super::instance::{Instance, failed};
use crate::error::{Error, ErrorKind, Feature, Result};
use crate::sys::num::u64_of;
use crate::sys::window::HUGE;

/// A GPU opened through Vulkan, closed on drop.
pub(super) struct Gpu {
    pub(super) device: ash::Device,
    /// The calls that map at a chosen address, where the driver has them.
    pub(super) placing: Option<ash::khr::map_memory2::DeviceFn>,
    pub(super) visible: Visible,
    /// After the device, which goes first.
    pub(super) instance: Arc<Instance>,
}

impl Gpu {
    pub(super) fn open(instance: &Arc<Instance>, physical: vk::PhysicalDevice, name: &str) -> Result<Arc<Self>> {
        let raw = &instance.raw;
        // SAFETY: for this and every call here: the physical device is one of this living instance, and what a call is
        // given outlives it.
        let table = unsafe { raw.get_physical_device_memory_properties(physical) };
        let visible = choose::memory_type(&table, name)?;
        // SAFETY: as above.
        let extensions = unsafe { raw.enumerate_device_extension_properties(physical) }
            .map_err(|result| failed("open GPU", "vkEnumerateDeviceExtensionProperties", result))?;
        let has = |name: &CStr| extensions.iter().any(|extension| extension.extension_name_as_c_str() == Ok(name));
        if !has(ash::khr::external_memory_fd::NAME) {
            return Err(Error::new(
                "open GPU",
                ErrorKind::UnsupportedFeature(Feature::Operation),
                format!("the Vulkan driver of {name} lacks VK_KHR_external_memory_fd"),
            )
            .remedy("update the GPU's driver"));
        }
        let places = has(ash::khr::map_memory2::NAME)
            && has(ash::ext::map_memory_placed::NAME)
            && places_in_windows(raw, physical);

        let mut names = vec![ash::khr::external_memory_fd::NAME.as_ptr()];
        let mut placed =
            vk::PhysicalDeviceMapMemoryPlacedFeaturesEXT::default().memory_map_placed(true).memory_unmap_reserve(true);
        // Vulkan makes no device without a queue; nothing is ever submitted to this one.
        let queues = [vk::DeviceQueueCreateInfo::default().queue_family_index(0).queue_priorities(&[1.0])];
        let mut info = vk::DeviceCreateInfo::default().queue_create_infos(&queues);
        if places {
            names.extend([ash::khr::map_memory2::NAME.as_ptr(), ash::ext::map_memory_placed::NAME.as_ptr()]);
            info = info.push_next(&mut placed);
        }
        let info = info.enabled_extension_names(&names);
        // SAFETY: as above.
        let device = unsafe { raw.create_device(physical, &info, None) }
            .map_err(|result| failed("open GPU", "vkCreateDevice", result))?;
        let placing = places.then(|| ash::khr::map_memory2::Device::new(raw, &device).fp().clone());
        tracing::debug!(name, type_index = visible.index, places, "a GPU is open through Vulkan");
        Ok(Arc::new(Self { device, placing, visible, instance: Arc::clone(instance) }))
    }
}

/// Whether mappings can be put at 2 MiB steps of a reservation, and be taken out of it again without a hole.
fn places_in_windows(raw: &ash::Instance, physical: vk::PhysicalDevice) -> bool {
    let mut features = vk::PhysicalDeviceMapMemoryPlacedFeaturesEXT::default();
    let mut query = vk::PhysicalDeviceFeatures2::default().push_next(&mut features);
    // SAFETY: as in `open`.
    unsafe { raw.get_physical_device_features2(physical, &mut query) };
    let mut properties = vk::PhysicalDeviceMapMemoryPlacedPropertiesEXT::default();
    let mut query = vk::PhysicalDeviceProperties2::default().push_next(&mut properties);
    // SAFETY: as in `open`.
    unsafe { raw.get_physical_device_properties2(physical, &mut query) };
    let step = properties.min_placed_memory_map_alignment;
    features.memory_map_placed == vk::TRUE
        && features.memory_unmap_reserve == vk::TRUE
        && step.is_power_of_two()
        && step <= u64_of(HUGE)
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: memory holds its GPU, so none is left; nothing was ever submitted.
        unsafe { self.device.destroy_device(None) };
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gpu")
            .field("visible", &self.visible)
            .field("places", &self.placing.is_some())
            .field("instance", &self.instance)
            .finish_non_exhaustive()
    }
}
