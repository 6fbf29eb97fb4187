//! A bare step cannot upload, because it may be a recording.

use stepscope::{Result, Step};

fn op(step: &Step<'_>) -> Result<()> {
    let _x = step.upload(&[1.0f32], [1])?;
    Ok(())
}

fn main() {}
