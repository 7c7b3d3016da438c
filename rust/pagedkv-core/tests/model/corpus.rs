//! What the fuzzer found worth keeping: `fuzz/corpus`, a folder per target and a file per case.

use std::panic::catch_unwind;
use std::path::Path;

/// Replays every case of a target; what fails names the file.
pub(crate) fn replay(target: &str, case: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let files = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut paths: Vec<_> = files.map(|file| file.expect("a file of the folder").path()).collect();
    paths.sort();
    assert!(!paths.is_empty(), "{} is empty", folder.display());
    for path in paths {
        let bytes = std::fs::read(&path).expect("a readable file");
        assert!(catch_unwind(|| case(&bytes)).is_ok(), "{}", path.display());
    }
}
