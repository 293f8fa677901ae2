//! Adds libdc's folder to the run path of tests and examples, since Cargo does not pass on dc-sys's.

fn main() {
    if let Ok(folder) = std::env::var("DEP_DC_LIBDIR") {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{}", folder);
    }
}
