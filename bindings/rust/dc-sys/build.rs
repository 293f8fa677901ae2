//! Finds libdc: in the folder LIBDC_LIB_DIR, otherwise by pkg-config's `dc`, otherwise the library that `make` or `make
//! test` built in this checkout. With the feature `vendored`, meson builds it from the sources. Dependents find the
//! folder in DEP_DC_LIBDIR, to add it to their programs' run path. docs.rs, which sets DOCS_RS, needs no libdc.

use std::env;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The versions whose ABI these bindings describe, as pkg-config sees them.
const AT_LEAST: &str = "dc >= 0.1";
const BELOW: &str = "dc < 0.2";

fn has_library(folder: &Path) -> bool {
    folder.join("libdc.so").exists() || folder.join("libdc.a").exists() || folder.join("libdc.dylib").exists()
}

fn from_environment() -> Option<PathBuf> {
    let folder = PathBuf::from(env::var_os("LIBDC_LIB_DIR")?);
    // Cargo runs this program, and rustc, in other folders than its caller's.
    let found = folder.is_absolute() && has_library(&folder);
    assert!(found, "LIBDC_LIB_DIR = {}, must be the absolute path of a folder with libdc in it", folder.display());
    Some(folder)
}

fn from_pkg_config() -> Option<PathBuf> {
    let tool = env::var_os("PKG_CONFIG").unwrap_or_else(|| "pkg-config".into());
    let ask = |words: &[&str]| Command::new(&tool).args(words).output().ok().filter(|output| output.status.success());
    ask(&["--exists", AT_LEAST, BELOW])?;
    // pkgconf escapes blanks as a shell needs it.
    let place = String::from_utf8(ask(&["--variable=libdir", "dc"])?.stdout).ok()?.replace("\\ ", " ");
    let folder = PathBuf::from(place.trim());
    has_library(&folder).then_some(folder)
}

fn has_sources(root: &Path) -> bool {
    root.join("include/dc_api.h").exists()
}

/// The sources around this crate, which a crate from the registry does not have.
fn checkout() -> Option<PathBuf> {
    let root = Path::new(&env::var_os("CARGO_MANIFEST_DIR")?).join("../../..").canonicalize().ok()?;
    has_sources(&root).then_some(root)
}

/// The sources inside this crate if packaging/make_crates.py has packed it, otherwise those around it.
fn sources() -> Option<PathBuf> {
    let inside = Path::new(&env::var_os("CARGO_MANIFEST_DIR")?).join("vendor");
    if has_sources(&inside) {
        return Some(inside);
    }
    checkout()
}

/// Where this checkout's own commands build libdc, without the builds that have sanitizers.
fn from_checkout() -> Option<PathBuf> {
    let folders = ["build/prefix/lib", "build/gcc", "build/package", "build"];
    let root = checkout()?;
    folders.iter().map(|folder| root.join(folder)).find(|folder| has_library(folder))
}

fn run(tool: &str, words: &[&OsStr]) {
    let status = Command::new(tool).args(words).status();
    let status = status.unwrap_or_else(|error| panic!("{}, which the feature `vendored` needs: {}", tool, error));
    assert!(status.success(), "{} {:?}: {}", tool, words, status);
}

/// Builds the library into cargo's own folder.
fn vendored() -> PathBuf {
    let root = sources().expect("the feature `vendored` needs the sources in this crate's folder vendor, or around it");
    // Without these lines cargo would rerun this program only for changed variables, and link an old library.
    for name in ["include", "meson.build", "meson_options.txt", "src"] {
        println!("cargo:rerun-if-changed={}", root.join(name).display());
    }
    let folder = PathBuf::from(env::var_os("OUT_DIR").unwrap()).join("libdc");
    if !folder.join("build.ninja").exists() {
        let options = ["--buildtype=release", "-Dtests=false"].map(OsStr::new);
        run("meson", &["setup".as_ref(), options[0], options[1], folder.as_os_str(), root.as_os_str()]);
    }
    run("meson", &["compile".as_ref(), "-C".as_ref(), folder.as_os_str(), "dc:shared_library".as_ref()]);
    folder
}

fn main() {
    for name in ["LIBDC_LIB_DIR", "DOCS_RS", "PKG_CONFIG", "PKG_CONFIG_PATH"] {
        println!("cargo:rerun-if-env-changed={}", name);
    }
    if env::var_os("DOCS_RS").is_some() {
        return;
    }
    let found = from_environment().or_else(from_pkg_config).or_else(from_checkout);
    let found = found.or_else(|| env::var_os("CARGO_FEATURE_VENDORED").map(|_| vendored()));
    let folder = found.unwrap_or_else(|| {
        panic!(
            "libdc is nowhere: set LIBDC_LIB_DIR to its folder (`python -m libdc.config --libdir` prints that of the \
             Python package) or PKG_CONFIG_PATH to that of dc.pc, or run `make` in the checkout, or ask for the \
             feature `vendored`, which builds it with meson"
        )
    });
    println!("cargo:rustc-link-search=native={}", folder.display());
    println!("cargo:rustc-link-lib=dc");
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", folder.display());
    println!("cargo:libdir={}", folder.display());
}
