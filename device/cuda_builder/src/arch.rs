//! GPU architectures, with rust-cuda's names. An architecture is the same string (`sm_121`)
//! everywhere.

use std::{fmt, str::FromStr};

use crate::CudaBuilderError;

macro_rules! architectures {
    ($($name:ident = $sm:literal, $number:literal;)*) => {
        /// A GPU architecture to compile for: `Compute121` is `sm_121`, the GB10.
        ///
        /// A suffix `a` or `f` adds instructions that other GPUs, or GPUs of other families, do not
        /// have.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum NvvmArch {
            $(#[doc = concat!("`", $sm, "`")] $name,)*
        }

        impl NvvmArch {
            /// Every architecture that this crate supports, oldest first.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// Returns the name that rustc, LLVM and ptxas use: `sm_121`.
            pub const fn sm(self) -> &'static str {
                match self { $(Self::$name => $sm,)* }
            }

            /// Returns the compute capability as major * 10 + minor: 121 for 12.1.
            pub const fn capability(self) -> u32 {
                match self { $(Self::$name => $number,)* }
            }
        }
    };
}

architectures! {
    Compute70 = "sm_70", 70;
    Compute72 = "sm_72", 72;
    Compute75 = "sm_75", 75;
    Compute80 = "sm_80", 80;
    Compute86 = "sm_86", 86;
    Compute87 = "sm_87", 87;
    Compute89 = "sm_89", 89;
    Compute90 = "sm_90", 90;
    Compute90a = "sm_90a", 90;
    Compute100 = "sm_100", 100;
    Compute100f = "sm_100f", 100;
    Compute100a = "sm_100a", 100;
    Compute103 = "sm_103", 103;
    Compute103f = "sm_103f", 103;
    Compute103a = "sm_103a", 103;
    Compute120 = "sm_120", 120;
    Compute120f = "sm_120f", 120;
    Compute120a = "sm_120a", 120;
    Compute121 = "sm_121", 121;
    Compute121f = "sm_121f", 121;
    Compute121a = "sm_121a", 121;
}

impl fmt::Display for NvvmArch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.sm())
    }
}

impl FromStr for NvvmArch {
    type Err = CudaBuilderError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .iter()
            .copied()
            .find(|arch| arch.sm() == text)
            .ok_or_else(|| CudaBuilderError::UnknownArch { asked: text.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back() {
        for arch in NvvmArch::ALL {
            assert_eq!(arch.sm().parse::<NvvmArch>().unwrap(), *arch);
            assert!(arch.sm().starts_with(&format!("sm_{}", arch.capability())));
        }
    }

    #[test]
    fn unknown_names_are_refused() {
        let message = "sm_12".parse::<NvvmArch>().unwrap_err().to_string();
        assert!(message.contains("`sm_12`") && message.contains("sm_121"), "{message}");
    }
}
