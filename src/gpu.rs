//! What is known about a GPU without opening it.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, ErrorKind};

/// A PCI address, `domain:bus:device.function`. The function of a GPU is 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PciAddress {
    /// PCI domain (segment).
    pub domain: u32,
    /// Bus number.
    pub bus: u8,
    /// Device (slot) number, 0 to 31.
    pub device: u8,
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.0", self.domain, self.bus, self.device)
    }
}

impl FromStr for PciAddress {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let parse = || {
            let (domain, rest) = text.trim().split_once(':')?;
            let (bus, rest) = rest.split_once(':')?;
            let device = rest.split('.').next()?;
            Some(Self {
                domain: u32::from_str_radix(domain, 16).ok()?,
                bus: u8::from_str_radix(bus, 16).ok()?,
                device: u8::from_str_radix(device, 16).ok()?,
            })
        };
        parse().ok_or_else(|| {
            Error::new("parse", ErrorKind::InvalidArgument, format!("'{text}' is not a PCI address"))
                .remedy("write it as 0000:01:00.0")
        })
    }
}

/// The GPU's BAR1 aperture: the part of its memory that the CPU can address at one time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bar1 {
    /// Size of the aperture in bytes.
    pub total_bytes: u64,
    /// Bytes mapped now, by all processes.
    pub used_bytes: u64,
}

/// The GPU's PCIe link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Link {
    /// PCIe generation the link runs at now; it drops when the GPU is idle.
    pub generation: u32,
    /// Lanes in use.
    pub width: u32,
    /// Highest generation that GPU and slot agree on.
    pub max_generation: u32,
    /// Most lanes that GPU and slot agree on.
    pub max_width: u32,
}

/// A GPU as a [`Session`](crate::Session) sees it.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub struct GpuInfo {
    /// CUDA ordinal in this process (`CUDA_VISIBLE_DEVICES` changes it), or the emulated GPU's number.
    pub ordinal: usize,
    /// Product name.
    pub name: String,
    /// PCI address; `None` for an emulated GPU.
    pub pci: Option<PciAddress>,
    /// Device memory in bytes.
    pub total_bytes: u64,
    /// BAR1 aperture, where the driver tells.
    pub bar1: Option<Bar1>,
    /// PCIe link, where the driver tells.
    pub link: Option<Link>,
    /// Driver version, such as `580.159.04`.
    pub driver: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pci_addresses_round_trip() {
        for text in ["0000:01:00.0", "0001:af:1f.0", "10000:00:02.0"] {
            assert_eq!(text.parse::<PciAddress>().unwrap().to_string(), text);
        }
        for text in ["", "01:00.0", "0000:zz:00.0", "0000:100:00.0"] {
            assert!(text.parse::<PciAddress>().is_err(), "{text}");
        }
    }
}
