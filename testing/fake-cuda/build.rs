//! As with the real driver, what it hands out and calls is its own, whatever a program has under
//! the same names.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    println!("cargo:rerun-if-changed=build.rs");
}
