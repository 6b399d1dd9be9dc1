//! What a session is opened with, and what was tried.

use std::env;
use std::fmt;

use crate::backend::emulated::{Emulated, EmulatedConfig};
use crate::backend::gdrdrv::Gdrdrv;
use crate::backend::{Backend, BackendKind, RmLevel};
use crate::copy::{self, Routine};
use crate::error::{Error, ErrorKind, Result};
use crate::policy::{Policy, Routines};
use crate::session::{Session, SessionInner};

/// What was tried when a session opened.
#[derive(Clone, Debug, Default)]
pub struct ProbeReport {
    passed_over: Vec<(BackendKind, Error)>,
    chosen: Option<BackendKind>,
    by: &'static str,
}

impl ProbeReport {
    /// The backends that were tried and not taken, each with the reason.
    pub fn passed_over(&self) -> impl Iterator<Item = (BackendKind, &Error)> {
        self.passed_over.iter().map(|(kind, error)| (*kind, error))
    }
}

impl fmt::Display for ProbeReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (kind, error) in &self.passed_over {
            writeln!(f, "{kind}: {error}")?;
        }
        match self.chosen {
            Some(kind) => write!(f, "{kind}: chosen by {}", self.by),
            None => write!(f, "no backend was chosen"),
        }
    }
}

/// An error in a variable's value, with the variable's name.
fn in_variable(name: &'static str, error: &Error) -> Error {
    Error::new("open", error.kind(), format!("{name}: {}", error.cause()))
        .remedy(error.hint().unwrap_or("unset it").to_owned())
}

/// Settings of a [`Session`]. What is set here wins over the environment, which wins over probing.
#[derive(Clone, Debug, Default)]
pub struct SessionBuilder {
    backend: Option<BackendKind>,
    rm: Option<RmLevel>,
    routine: Option<String>,
    policy: Option<Policy>,
    ignore_env: bool,
    allow_cuda_flush: bool,
    emulated: Option<EmulatedConfig>,
}

impl SessionBuilder {
    /// Uses this backend or fails. Environment: `GDRCOPY_BACKEND=gdrdrv|rm|vulkan|emulated`.
    #[must_use]
    pub fn backend(mut self, kind: BackendKind) -> Self {
        self.backend = Some(kind);
        self
    }

    /// How far the `rm` backend may go; [`RmLevel::Vmm`] by default. Environment: `GDRCOPY_RM=off|vmm|ipc`. The
    /// machine's administrator can cap the level (`rm = off|vmm|ipc` in `/etc/gdrcopy.conf`).
    #[must_use]
    pub fn rm(mut self, level: RmLevel) -> Self {
        self.rm = Some(level);
        self
    }

    /// Copies with the routine of this name (see [`copy::routines`]). Environment: `GDRCOPY_COPY`.
    #[must_use]
    pub fn copy_routine(mut self, name: impl Into<String>) -> Self {
        self.routine = Some(name.into());
        self
    }

    /// Follows this [policy](crate::policy) instead of the [built-in one](Policy::built_in). Environment:
    /// `GDRCOPY_POLICY=FILE`. A routine that is named by the program or by `GDRCOPY_COPY` wins over it at every size.
    #[must_use]
    pub fn policy(mut self, policy: Policy) -> Self {
        self.policy = Some(policy);
        self
    }

    /// Reads nothing from the environment.
    #[must_use]
    pub fn ignore_env(mut self) -> Self {
        self.ignore_env = true;
        self
    }

    /// Lets [`Mapping::publish`](crate::Mapping::publish) call CUDA between data and flag on GPUs that do not order
    /// such writes by themselves.
    #[must_use]
    pub fn allow_cuda_flush(mut self) -> Self {
        self.allow_cuda_flush = true;
        self
    }

    /// Settings of the emulated GPUs. They choose nothing: ask for [`BackendKind::Emulated`] as well.
    #[must_use]
    pub fn emulated(mut self, config: EmulatedConfig) -> Self {
        self.emulated = Some(config);
        self
    }

    fn env(&self, name: &'static str) -> Result<Option<String>> {
        if self.ignore_env {
            return Ok(None);
        }
        match env::var(name) {
            Ok(value) if value.is_empty() => Ok(None),
            Ok(value) => Ok(Some(value)),
            Err(env::VarError::NotPresent) => Ok(None),
            Err(env::VarError::NotUnicode(_)) => {
                Err(Error::new("open", ErrorKind::InvalidArgument, format!("{name} is not valid text"))
                    .remedy(format!("unset {name} or correct it")))
            }
        }
    }

    /// A setting from the environment, with its variable named in the error.
    fn parsed<T: std::str::FromStr<Err = Error>>(&self, name: &'static str) -> Result<Option<T>> {
        let Some(text) = self.env(name)? else { return Ok(None) };
        text.parse().map(Some).map_err(|error| in_variable(name, &error))
    }

    /// The copy routine that was named, if one was.
    fn routine(&self) -> Result<Option<&'static Routine>> {
        let name = "GDRCOPY_COPY";
        let in_env = self.env(name)?.map(|text| copy::by_name(&text).map_err(|error| in_variable(name, &error)));
        match (&self.routine, in_env) {
            // A name that is none is an error even where it is overruled, as with the other variables.
            (Some(_), Some(Err(error))) if error.kind() == ErrorKind::InvalidArgument => Err(error),
            (Some(name), _) => copy::by_name(name).map(Some),
            (None, Some(found)) => found.map(Some),
            (None, None) => Ok(None),
        }
    }

    /// The program's policy, that of the environment, or the built-in one.
    fn chosen_policy(&self) -> Result<Policy> {
        let name = "GDRCOPY_POLICY";
        let in_env = self.env(name)?.map(|file| Policy::read(file).map_err(|error| in_variable(name, &error)));
        match (&self.policy, in_env) {
            (Some(policy), _) => Ok(policy.clone()),
            (None, Some(found)) => found,
            (None, None) => Ok(Policy::built_in().clone()),
        }
    }

    /// Opens the session.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for an unknown name in the environment or a policy file that is none, `UnsupportedFeature` for a copy routine this CPU
    /// lacks, and, where no backend works, the reasons of each in one line (`NoDriver`, `NoDevice`,
    /// `PermissionDenied`, ...).
    pub fn open(self) -> Result<Session> {
        let named = self.routine()?;
        let policy = self.chosen_policy()?;
        let routines = named.map_or(policy.routines(), Routines::only);
        let from_env = self.parsed::<BackendKind>("GDRCOPY_BACKEND")?;
        let env_level = self.parsed::<RmLevel>("GDRCOPY_RM")?;
        let level = self.rm.or(env_level).unwrap_or(RmLevel::Vmm);
        let (asked, by) = match (self.backend, from_env) {
            (Some(kind), _) => (Some(kind), "the program"),
            (None, Some(kind)) => (Some(kind), "GDRCOPY_BACKEND"),
            (None, None) => (None, "probing"),
        };
        let mut report = ProbeReport { by, ..ProbeReport::default() };
        let backend = match asked {
            Some(kind) => self.try_backend(kind, level)?,
            None => self.probe(level, &mut report)?,
        };
        report.chosen = Some(backend.kind());
        for mismatch in policy.early_mismatches(backend.kind()) {
            tracing::warn!("the copy policy '{}' is of another machine: {mismatch}", policy.source());
        }
        Ok(Session::new(SessionInner::new(backend, (routines, policy), report, self.allow_cuda_flush)))
    }

    /// The first that works, in order of preference. The emulated one is never taken unasked.
    fn probe(&self, level: RmLevel, report: &mut ProbeReport) -> Result<Box<dyn Backend>> {
        let built_in = [BackendKind::Gdrdrv, BackendKind::Rm, BackendKind::Vulkan];
        for kind in built_in.into_iter().filter(|&kind| kind != BackendKind::Vulkan || cfg!(feature = "vulkan")) {
            match self.try_backend(kind, level) {
                Ok(backend) => return Ok(backend),
                Err(error) => report.passed_over.push((kind, error)),
            }
        }
        let causes: Vec<String> =
            report.passed_over.iter().map(|(kind, error)| format!("{kind}: {}", error.cause())).collect();
        // The backend that needs least is the one to mend.
        let mend = report.passed_over.iter().find(|(kind, _)| *kind == BackendKind::Rm).map(|(_, error)| error);
        let kind = mend.map_or(ErrorKind::NoDriver, Error::kind);
        let way_out = "for a try without a GPU set GDRCOPY_BACKEND=emulated";
        let remedy = match mend.and_then(Error::hint) {
            Some(hint) => format!("{hint}; {way_out}"),
            None => way_out.to_owned(),
        };
        Err(Error::new("open", kind, format!("no backend works here: {}", causes.join("; "))).remedy(remedy))
    }

    fn try_backend(&self, kind: BackendKind, level: RmLevel) -> Result<Box<dyn Backend>> {
        match kind {
            BackendKind::Gdrdrv => Ok(Box::new(Gdrdrv::open()?)),
            #[cfg(feature = "cuda")]
            BackendKind::Rm => Ok(Box::new(crate::backend::rm::Rm::open(level)?)),
            #[cfg(not(feature = "cuda"))]
            BackendKind::Rm => {
                let _ = level;
                Err(Error::new(
                    "open",
                    ErrorKind::UnsupportedFeature(crate::Feature::Operation),
                    "built without backend 'rm'",
                )
                .remedy("build gdrcopy with feature 'cuda'"))
            }
            #[cfg(feature = "vulkan")]
            BackendKind::Vulkan => Ok(Box::new(crate::backend::vulkan::Vulkan::open()?)),
            #[cfg(not(feature = "vulkan"))]
            BackendKind::Vulkan => Err(Error::new(
                "open",
                ErrorKind::UnsupportedFeature(crate::Feature::Operation),
                "built without backend 'vulkan'",
            )
            .remedy("build gdrcopy with feature 'vulkan'")),
            BackendKind::Emulated => {
                let config = match &self.emulated {
                    Some(config) => config.clone(),
                    None => EmulatedConfig::from_env(self.env("GDRCOPY_EMULATED_GPUS")?.as_deref())?,
                };
                Ok(Box::new(Emulated::new(config)?))
            }
        }
    }
}
