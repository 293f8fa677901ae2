//! Finds libdc: the folder in DC_LIB_DIR, else what pkg-config knows as `dc`, else what `make test` built in this checkout.
//! Dependents find the folder in DEP_DC_LIBDIR, to put it into their programs' run path.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The versions whose ABI these bindings describe, as pkg-config sees them.
const AT_LEAST: &str = "dc >= 0.1";
const BELOW: &str = "dc < 0.2";

fn has_library(folder: &Path) -> bool {
    folder.join("libdc.so").exists() || folder.join("libdc.a").exists() || folder.join("libdc.dylib").exists()
}

fn from_environment() -> Option<PathBuf> {
    let folder = PathBuf::from(env::var_os("DC_LIB_DIR")?);
    assert!(has_library(&folder), "DC_LIB_DIR = {}, must be a folder that has libdc in it", folder.display());
    Some(folder)
}

fn from_pkg_config() -> Option<PathBuf> {
    let tool = env::var_os("PKG_CONFIG").unwrap_or_else(|| "pkg-config".into());
    let output = Command::new(tool).args(["--variable=libdir", AT_LEAST, BELOW]).output().ok()?;
    let folder = PathBuf::from(String::from_utf8(output.stdout).ok()?.trim());
    (output.status.success() && has_library(&folder)).then_some(folder)
}

/// Where this checkout's own commands put a libdc; builds with sanitizers are for their tests alone.
fn from_checkout() -> Option<PathBuf> {
    let root = Path::new(&env::var_os("CARGO_MANIFEST_DIR")?).join("../../..").canonicalize().ok()?;
    ["build/prefix/lib", "build/gcc", "build"].iter().map(|folder| root.join(folder)).find(|folder| has_library(folder))
}

fn main() {
    for name in ["DC_LIB_DIR", "PKG_CONFIG", "PKG_CONFIG_PATH"] {
        println!("cargo:rerun-if-env-changed={}", name);
    }
    let folder = from_environment().or_else(from_pkg_config).or_else(from_checkout).unwrap_or_else(|| {
        panic!("libdc is nowhere: set DC_LIB_DIR to its folder, or PKG_CONFIG_PATH to that of dc.pc, or run `make test SUITES=gcc`")
    });
    println!("cargo:rustc-link-search=native={}", folder.display());
    println!("cargo:rustc-link-lib=dc");
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", folder.display());
    println!("cargo:libdir={}", folder.display());
}
