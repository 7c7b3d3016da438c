//! Copies the CUDA sources to `OUT_DIR/cuda`, from where maturin puts them into the package as `pagedkv/cuda`.

#![allow(clippy::print_stdout, reason = "build scripts speak to cargo on stdout")]

use std::path::{Path, PathBuf};
use std::{env, fs, io};

fn main() -> io::Result<()> {
    let sources = directory("CARGO_MANIFEST_DIR").join("../../cuda");
    let copy = directory("OUT_DIR").join("cuda");
    println!("cargo:rerun-if-changed={}", sources.display());
    if copy.exists() {
        fs::remove_dir_all(&copy)?; // else a deleted kernel would stay in the wheel
    }
    copy_tree(&sources, &copy)
}

/// The directory that cargo names in an environment variable.
fn directory(variable: &str) -> PathBuf {
    env::var_os(variable).expect("cargo sets it for build scripts").into()
}

fn copy_tree(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_tree(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}
