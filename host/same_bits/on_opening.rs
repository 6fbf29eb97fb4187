//! Opening a device, and testing kernels that nobody knows on the way.
//!
//! Invariant: no device is handed out whose kernels were tested and are not right.

#![forbid(unsafe_code)]

use super::Tested;
use super::remembered::{Key, Remembered};
use crate::driver::{Device, DeviceBuilder, SelfTest};
use crate::error::{Error, Result};

impl DeviceBuilder {
    /// Opens the device. A GPU whose kernels are new there is tested first; see [`SelfTest`].
    ///
    /// # Errors
    /// [`Error::NoDevice`] when it is not there or this build cannot drive it, with what to do; [`Error::Kernels`] when one of its kernels
    /// is not right, also where [`DeviceKind::Auto`](crate::DeviceKind::Auto) has chosen it; [`Error::Timeout`] when the driver does not
    /// answer; [`Error::Misuse`] for a malformed `STEPSCOPE_CHECKED` or `STEPSCOPE_SELF_TEST`, and for kernels of two packages of one
    /// name, or of one that is named like stepscope's own.
    pub fn open(self) -> Result<Device> {
        let (when, planted) = (self.tests()?, self.has_faults());
        let device = self.open_untested()?;
        // What a device with planted faults does says nothing about others.
        let key = if planted { None } else { Key::of(device.description()) };
        // The cache is looked for where it is needed: not for the emulator.
        guard(&device, when, key.as_ref(), || Remembered::of_user())?;
        Ok(device)
    }
}

/// Tests a device where it must be tested. The `key` names kernels that can be remembered.
fn guard(
    device: &Device,
    when: SelfTest,
    key: Option<&Key>,
    remembered: impl FnOnce() -> Option<Remembered>,
) -> Result<()> {
    if when == SelfTest::Never || (when == SelfTest::WhenNew && key.is_none()) {
        return Ok(());
    }
    let known = key.and_then(|key| Some((key, remembered()?)));
    if when == SelfTest::WhenNew && known.as_ref().is_some_and(|(key, remembered)| remembered.find(key).is_some()) {
        return Ok(());
    }
    let found = device.self_test();
    match (&found, &known) {
        (Ok(tested), Some((key, remembered))) => remembered.remember(key, *tested),
        (Err(Error::Kernels { .. }), Some((key, remembered))) => remembered.forget(key),
        _ => {}
    }
    let Tested { kernels, elapsed } = found?;
    tracing::info!(kernels, seconds = elapsed.as_secs_f64(), "kernels tested");
    Ok(())
}
