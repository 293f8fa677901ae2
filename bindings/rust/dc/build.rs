//! Puts libdc's folder into the run path of tests and examples: Cargo does not pass on that of dc-sys.

fn main() {
    if let Ok(folder) = std::env::var("DEP_DC_LIBDIR") {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{}", folder);
    }
}
