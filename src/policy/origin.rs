//! What a policy was measured on.

use crate::backend::BackendKind;
use crate::error::Result;
use crate::gpu::GpuInfo;
use crate::mapping::Mapping;
use crate::session::Session;
use crate::sys::{cpu, date};

/// What a policy was measured on, as far as is known.
#[non_exhaustive]
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct MeasuredOn {
    /// Model name of the CPU.
    pub cpu: Option<String>,
    /// Product name of the GPU.
    pub gpu: Option<String>,
    /// PCIe link, such as `gen 5 x16`.
    pub link: Option<String>,
    /// Backend.
    pub backend: Option<String>,
    /// Mapping type, such as `WC`.
    pub mapping: Option<String>,
    /// Version of the GPU's driver.
    pub driver: Option<String>,
    /// When, in UTC.
    pub date: Option<String>,
}

impl MeasuredOn {
    /// This machine, as far as it is known without a GPU.
    pub(super) fn here(backend: BackendKind) -> Self {
        Self { cpu: cpu::model(), backend: Some(backend.name().to_owned()), ..Self::default() }
    }

    fn on(self, gpu: &GpuInfo) -> Self {
        let link = gpu.link.map(|link| format!("gen {} x{}", link.max_generation, link.max_width));
        Self { gpu: Some(gpu.name.clone()), link, driver: gpu.driver.clone(), ..self }
    }

    /// This machine, with the GPU of this ordinal and a mapping of its memory, at this moment.
    pub(crate) fn now(session: &Session, ordinal: usize, mapping: &Mapping<'_>) -> Result<Self> {
        let here = Self::of(session, ordinal)?;
        Ok(Self { mapping: Some(mapping.mapping_type().to_string()), date: date::now(), ..here })
    }

    /// This machine, with the GPU of this ordinal.
    pub(super) fn of(session: &Session, ordinal: usize) -> Result<Self> {
        let here = Self::here(session.backend());
        let gpus = session.gpus()?;
        Ok(match gpus.iter().find(|gpu| gpu.ordinal == ordinal) {
            Some(gpu) => here.on(gpu),
            None => here,
        })
    }

    /// Names and values, in the order of the file.
    pub(super) fn facts(&self) -> [(&'static str, &Option<String>); 7] {
        [
            ("cpu", &self.cpu),
            ("gpu", &self.gpu),
            ("link", &self.link),
            ("backend", &self.backend),
            ("mapping", &self.mapping),
            ("driver", &self.driver),
            ("date", &self.date),
        ]
    }

    /// What is known of both and differs, but for the date.
    pub(super) fn differences(&self, here: &Self) -> Vec<String> {
        let pairs = self.facts().into_iter().zip(here.facts()).filter(|((name, _), _)| *name != "date");
        let known = pairs.filter_map(|((name, there), (_, here))| Some((name, there.as_ref()?, here.as_ref()?)));
        known
            .filter(|(_, there, here)| there != here)
            .map(|(name, there, here)| format!("{name}: measured on '{there}', and this is '{here}'"))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_of_what_is_known() {
        let text = |text: &str| Some(text.to_owned());
        let there = MeasuredOn { cpu: text("A"), gpu: text("H200"), date: text("then"), ..MeasuredOn::default() };
        let here = MeasuredOn { cpu: text("B"), driver: text("580"), date: text("now"), ..MeasuredOn::default() };
        assert_eq!(there.differences(&here), ["cpu: measured on 'A', and this is 'B'"]);
        assert!(there.differences(&there).is_empty());
    }
}
