//! Kernels and tools for the virtual machine, from the Debian archive that this machine's apt is configured for.
//!
//! Nothing of the system's apt is changed but by the installation of missing tools: lists and packages lie in a cache of
//! ours (`GDRCOPY_VM_CACHE`, or `vm-cache` in the target folder), with a checksum beside each package.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use crate::run::{Log, capture, command, query, run};
use crate::workspace::Workspace;

/// A kernel resolved longer ago than this is looked up again, if there is a network.
const FRESH: Duration = Duration::from_secs(7 * 24 * 3600);

/// Programs that the tests call, and the packages that have them.
const TOOLS: [(&str, &str); 7] = [
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("busybox", "busybox-static"),
    ("sparse", "sparse"),
    ("make", "make"),
    ("gcc", "gcc"),
    ("strip", "binutils"),
    ("patch", "patch"),
];

#[derive(Debug)]
pub(crate) struct Kernel {
    /// What its working folder is called.
    pub(crate) name: String,
    pub(crate) release: String,
    pub(crate) image: PathBuf,
    pub(crate) build_tree: PathBuf,
}

#[derive(Debug)]
pub(crate) struct Apt {
    cache: PathBuf,
    state: PathBuf,
    config: PathBuf,
}

pub(crate) fn cache_dir(workspace: &Workspace) -> PathBuf {
    std::env::var_os("GDRCOPY_VM_CACHE").map_or_else(|| workspace.target.join("vm-cache"), PathBuf::from)
}

pub(crate) fn io_error(path: &Path) -> impl FnOnce(std::io::Error) -> String {
    move |error| format!("{}: {error}", path.display())
}

impl Apt {
    /// `None` where there is no apt.
    pub(crate) fn new(cache: &Path) -> Result<Option<Self>, String> {
        Self::configured(cache, "apt", "")
    }

    /// With these sources only, in the one-line format, and lists of its own.
    pub(crate) fn with_sources(cache: &Path, name: &str, sources: &str) -> Result<Option<Self>, String> {
        let list = cache.join(format!("{name}.list"));
        fs::create_dir_all(cache).map_err(io_error(cache))?;
        fs::write(&list, sources).map_err(io_error(&list))?;
        let more = format!("Dir::Etc::sourcelist \"{}\";\nDir::Etc::sourceparts \"-\";\n", list.display());
        Self::configured(cache, name, &more)
    }

    fn configured(cache: &Path, name: &str, more: &str) -> Result<Option<Self>, String> {
        if query("apt-get", ["--version"]).is_none() {
            return Ok(None);
        }
        let state = cache.join(name);
        for dir in ["state/lists/partial", "cache/archives/partial"] {
            let dir = state.join(dir);
            fs::create_dir_all(&dir).map_err(io_error(&dir))?;
        }
        let deb = cache.join("deb");
        fs::create_dir_all(&deb).map_err(io_error(&deb))?;
        let config = state.join("apt.conf");
        let text = format!(
            "Dir::State \"{0}/state\";\nDir::State::status \"/var/lib/dpkg/status\";\nDir::Cache \"{0}/cache\";\n{more}",
            state.display()
        );
        fs::write(&config, text).map_err(io_error(&config))?;
        Ok(Some(Self { cache: cache.to_owned(), state, config }))
    }

    /// A command of apt's that reads and writes our lists only.
    pub(crate) fn command<'a>(&self, program: &str, args: impl IntoIterator<Item = &'a str>) -> Command {
        let mut command = command(program, args);
        command.env("APT_CONFIG", &self.config).env("LC_ALL", "C");
        command
    }

    pub(crate) fn update(&self, log: &mut Log) -> Result<(), String> {
        run(log, self.command("apt-get", ["update", "-q", "-o", "Acquire::Retries=2"]))
    }

    /// Names of the packages that `package` depends on; none if it is not known.
    pub(crate) fn depends(&self, package: &str) -> Vec<String> {
        let output = self.command("apt-cache", ["depends", "--important", package]).output();
        output.map(|output| dependencies(&String::from_utf8_lossy(&output.stdout))).unwrap_or_default()
    }

    /// Downloads a package into the cache, unless it is there and whole.
    pub(crate) fn download(&self, log: &mut Log, package: &str) -> Result<PathBuf, String> {
        // In an empty folder: what lies in the current one already is not listed.
        let mut list = self.command("apt-get", ["download", "--print-uris", package]);
        list.current_dir(&self.state);
        let listed = capture(log, list)?;
        let (name, sum) =
            listed.lines().find_map(uri_line).ok_or_else(|| format!("apt-get does not say where {package} is"))?;
        let deb = self.cache.join("deb").join(&name);
        if deb.exists() && sha256(&deb).as_deref() == Some(sum.as_str()) {
            return Ok(deb);
        }
        let mut download = self.command("apt-get", ["download", "-q", package]);
        download.current_dir(self.cache.join("deb"));
        run(log, download)?;
        if sha256(&deb).as_deref() != Some(sum.as_str()) {
            return Err(format!("{}: not the file that the archive lists", deb.display()));
        }
        Ok(deb)
    }
}

/// The names in the output of `apt-cache depends`; of alternatives, the last.
fn dependencies(output: &str) -> Vec<String> {
    output.lines().filter_map(|line| line.strip_prefix("  Depends: ")).map(str::to_owned).collect()
}

/// File name and checksum in a line of `apt-get download --print-uris`: 'URI' NAME SIZE SHA256:SUM.
fn uri_line(line: &str) -> Option<(String, String)> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [_, name, _, sum] = words[..] else { return None };
    Some((name.to_owned(), sum.strip_prefix("SHA256:")?.to_owned()))
}

fn sha256(file: &Path) -> Option<String> {
    query("sha256sum", [file.to_str()?])?.split_whitespace().next().map(str::to_owned)
}

fn is_root() -> bool {
    query("id", ["-u"]).is_some_and(|id| id.trim() == "0")
}

fn has_program(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(name).exists())
}

/// Installs what is missing, and says what that is; without the rights to, says how.
pub(crate) fn install_tools(log: &mut Log, workspace: &Workspace, compilers: &[String]) -> Result<(), String> {
    let tools = TOOLS.iter().map(|&(program, package)| (program, package));
    let compilers = compilers.iter().map(|compiler| (compiler.as_str(), compiler.as_str()));
    let missing: Vec<&str> =
        tools.chain(compilers).filter(|(program, _)| !has_program(program)).map(|(_, package)| package).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let list = missing.join(" ");
    let Some(apt) = Apt::new(&cache_dir(workspace))?.filter(|_| is_root()) else {
        return Err(format!("not installed: {list}; `apt-get install --no-install-recommends {list}` installs them"));
    };
    log.keep(format!("installing {list}"));
    if apt.depends("qemu-system-x86").is_empty() {
        apt.update(log)?;
    }
    let install = ["install", "-y", "-q", "--no-install-recommends"];
    let mut install = apt.command("apt-get", install.into_iter().chain(missing));
    install.env("DEBIAN_FRONTEND", "noninteractive");
    run(log, install)
}

/// The newest kernel of a series; `Err` inside says why there is none to be had here.
pub(crate) fn kernel(log: &mut Log, workspace: &Workspace, series: &str) -> Result<Result<Kernel, String>, String> {
    let cache = cache_dir(workspace);
    let stamp = cache.join(format!("kernel-{series}"));
    let resolved = match cached(&stamp) {
        Some((release, true)) => Ok(release),
        earlier => match fetch(log, &cache, series, &stamp) {
            Ok(release) => Ok(release),
            Err(error) => match earlier {
                Some((release, _)) => {
                    log.keep(format!("kernel {series}: {error}; taking {release} from the cache"));
                    Ok(release)
                }
                None => Err(error),
            },
        },
    };
    let release = match resolved {
        Ok(release) => release,
        Err(reason) => return Ok(Err(format!("no kernel {series}: {reason}"))),
    };
    let root = cache.join(&release);
    let build_tree = root.join("usr/src").join(format!("linux-headers-{release}"));
    if let Err(reason) = install_tools(log, workspace, &compiler(&build_tree)) {
        return Ok(Err(reason));
    }
    Ok(Ok(Kernel { name: series.to_owned(), image: root.join(format!("boot/vmlinuz-{release}")), build_tree, release }))
}

/// A kernel built from source: its build tree, image included.
pub(crate) fn build_tree(tree: &Path) -> Result<Kernel, String> {
    let tree = fs::canonicalize(tree).map_err(io_error(tree))?;
    let release = tree.join("include/config/kernel.release");
    let release = fs::read_to_string(&release).map_err(io_error(&release))?.trim().to_owned();
    Ok(Kernel { name: release.clone(), release, image: tree.join("arch/x86/boot/bzImage"), build_tree: tree })
}

/// Release in the cache, and whether it was resolved recently.
fn cached(stamp: &Path) -> Option<(String, bool)> {
    let release = fs::read_to_string(stamp).ok()?.trim().to_owned();
    let age = SystemTime::now().duration_since(fs::metadata(stamp).ok()?.modified().ok()?).unwrap_or_default();
    Some((release, age < FRESH))
}

/// Resolves the series, downloads and unpacks its packages, and leaves the stamp when all is there.
fn fetch(log: &mut Log, cache: &Path, series: &str, stamp: &Path) -> Result<String, String> {
    let apt = Apt::new(cache)?.ok_or("this machine has no apt-get")?;
    apt.update(log)?;
    let release = ["linux-image-cloud-amd64".to_owned(), format!("linux-image-{series}-cloud-amd64")]
        .iter()
        .flat_map(|metapackage| apt.depends(metapackage))
        .find_map(|package| of_series(package.strip_prefix("linux-image-")?, series))
        .ok_or("the archive that apt is configured for has none, or cannot be reached")?;
    let root = cache.join(&release);
    let headers = format!("linux-headers-{release}");
    let mut packages = vec![format!("linux-image-{release}"), headers.clone()];
    packages.extend(
        apt.depends(&headers).into_iter().filter(|name| name.ends_with("-common") || name.starts_with("linux-kbuild-")),
    );
    for package in packages {
        let deb = apt.download(log, &package)?;
        fs::create_dir_all(&root).map_err(io_error(&root))?;
        run(log, command("dpkg-deb", [Path::new("-x"), &deb, &root]))?;
    }
    relocate(&root.join("usr/src").join(&headers).join("Makefile"), &root)?;
    fs::write(stamp, &release).map_err(io_error(stamp))?;
    Ok(release)
}

/// `6.1.0-57-cloud-amd64` is of series 6.1, `6.12.1-..` is not.
fn of_series(release: &str, series: &str) -> Option<String> {
    release.strip_prefix(series)?.starts_with('.').then(|| release.to_owned())
}

/// The headers' Makefile names the common headers by their place on an installed system.
fn relocate(makefile: &Path, root: &Path) -> Result<(), String> {
    let text = fs::read_to_string(makefile).map_err(io_error(makefile))?;
    if !text.contains(&format!("{}", root.display())) {
        let text = text.replace("/usr/src/", &format!("{}/usr/src/", root.display()));
        fs::write(makefile, text).map_err(io_error(makefile))?;
    }
    Ok(())
}

/// The compiler that the kernel was built with, from its headers: `CC = $(if ..) $(CROSS_COMPILE)gcc-12`.
fn compiler(build_tree: &Path) -> Vec<String> {
    let text = fs::read_to_string(build_tree.join(".kernelvariables")).unwrap_or_default();
    compiler_in(&text).into_iter().collect()
}

fn compiler_in(text: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with("CC = "))?;
    let name = line.rsplit(')').next()?.trim();
    name.starts_with("gcc-").then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_is_of_one_series() {
        assert_eq!(of_series("6.1.0-57-cloud-amd64", "6.1").as_deref(), Some("6.1.0-57-cloud-amd64"));
        assert_eq!(of_series("6.12.117+deb12-cloud-amd64", "6.1"), None);
        assert_eq!(of_series("6.12.117+deb12-cloud-amd64", "6.12").as_deref(), Some("6.12.117+deb12-cloud-amd64"));
    }

    #[test]
    fn dependencies_are_named_without_alternatives() {
        let output =
            "linux-headers-x\n  Depends: linux-base\n |Depends: linux-image-x\n  Depends: linux-kbuild-6.1\n    y\n";
        assert_eq!(dependencies(output), ["linux-base", "linux-kbuild-6.1"]);
    }

    #[test]
    fn a_uri_line_has_name_and_checksum() {
        let line = "'mirror/l/linux/a_1%2b2_amd64.deb' a_1+2_amd64.deb 1234 SHA256:00ff";
        assert_eq!(uri_line(line), Some(("a_1+2_amd64.deb".to_owned(), "00ff".to_owned())));
        assert_eq!(uri_line("Reading package lists..."), None);
        assert_eq!(uri_line("'u' n 1 MD5Sum:00"), None);
    }

    #[test]
    fn the_kernels_compiler_is_read() {
        let text = "override ARCH = x86\nCC = $(if $(A),$(B)) $(CROSS_COMPILE)gcc-12\n";
        assert_eq!(compiler_in(text).as_deref(), Some("gcc-12"));
        assert_eq!(compiler_in("CC = cc\n"), None);
    }
}
