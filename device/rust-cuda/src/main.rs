//! Writes the kernels' PTX, as rust-cuda made it, under the name that `STEPSCOPE_PTX_DIR` expects:
//! `stepscope-rust-cuda DIR`.
#![forbid(unsafe_code)]

use std::{
    env, fs, io,
    path::{Path, PathBuf},
    process::ExitCode,
};

const PTX: &str = include_str!(concat!(env!("OUT_DIR"), "/sm_121.ptx"));

fn main() -> ExitCode {
    let Some(folder) = env::args_os().nth(1).map(PathBuf::from) else {
        eprintln!("usage: stepscope-rust-cuda DIR");
        return ExitCode::from(2);
    };
    match write(&folder) {
        Ok(file) => {
            println!("{}", file.display());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{}: {error}", folder.display());
            ExitCode::FAILURE
        }
    }
}

fn write(folder: &Path) -> io::Result<PathBuf> {
    fs::create_dir_all(folder)?;
    let file = folder.join("sm_121.ptx");
    fs::write(&file, PTX)?;
    Ok(file)
}
