//! No kernel goes around the detector: in `device/src/kernels` memory is touched through `vector.rs` and `tile.rs` alone.

use crate::support::sources::SOURCES;

/// Lines of a kernel file that dereference a pointer or index a slice argument themselves.
fn bypasses(source: &str) -> Vec<&str> {
    let touches =
        [".add(", ".offset(", ".read()", ".write(", "read_volatile", "get_unchecked", "from_raw_parts", "as_ptr()"];
    let code = source.lines().map(str::trim).filter(|line| !line.starts_with("//"));
    code.filter(|line| touches.iter().any(|touch| line.contains(touch))).collect()
}

#[test]
fn a_bypass_is_seen() {
    assert_eq!(
        bypasses("/// x.add(1)\n    *out.add(row) = total;\nstore(out, row, total);"),
        ["*out.add(row) = total;"]
    );
    assert_eq!(bypasses("let x = x.as_ptr();\nlet y = unsafe { y.get_unchecked(3) };").len(), 2);
}

#[test]
fn no_kernel_bypasses_the_detector() {
    for (name, source) in SOURCES {
        assert_eq!(bypasses(source), [""; 0], "{name}");
    }
}
