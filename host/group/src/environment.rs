//! Reads the environment variables that launchers set.

#![forbid(unsafe_code)]

use super::config::GroupConfig;
use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::str::FromStr;
use stepscope_core::{Error, Result};

/// The variable of the secret.
const SECRET: &str = "STEPSCOPE_GROUP_SECRET";

/// The variables of a launcher.
struct Launcher {
    name: &'static str,
    /// The variables whose presence shows that it has started this process.
    marks: &'static [&'static str],
    /// The variables of the rank, of the number of ranks, and of the rank on its host. The first
    /// that is set counts.
    rank: &'static [&'static str],
    ranks: &'static [&'static str],
    local_rank: &'static [&'static str],
}

/// The launchers in the order of the search. A launcher that another one starts comes first.
///
/// Slurm sets the number of tasks of a job even for programs that are no task of it, as in the
/// shell of `salloc`. A job without a number of tasks has one.
const LAUNCHERS: [Launcher; 4] = [
    Launcher {
        name: "torchrun",
        marks: &["RANK", "WORLD_SIZE"],
        // A pod of an indexed job of Kubernetes has its rank as JOB_COMPLETION_INDEX.
        rank: &["RANK", "JOB_COMPLETION_INDEX"],
        ranks: &["WORLD_SIZE"],
        local_rank: &["LOCAL_RANK"],
    },
    Launcher {
        name: "Open MPI",
        marks: &["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"],
        rank: &["OMPI_COMM_WORLD_RANK"],
        ranks: &["OMPI_COMM_WORLD_SIZE"],
        local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
    },
    Launcher {
        name: SLURM,
        marks: &["SLURM_PROCID"],
        rank: &["SLURM_PROCID"],
        ranks: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
        local_rank: &["SLURM_LOCALID"],
    },
    Launcher {
        name: "MPICH",
        marks: &["PMI_RANK"],
        rank: &["PMI_RANK"],
        ranks: &["PMI_SIZE"],
        local_rank: &["MPI_LOCALRANKID"],
    },
];
const SLURM: &str = "Slurm";

/// The first port that is derived from Slurm's numbers, and the number of such ports. They lie
/// below those that systems hand out.
const SLURM_PORTS: (u64, u64) = (15_000, 10_000);
/// The distance between the ports of a job's steps.
const STEP_STRIDE: u64 = 101;

impl GroupConfig {
    /// Reads the configuration that `torchrun`, Open MPI, Slurm or MPICH set in environment
    /// variables, in this order. `None` without any of them.
    ///
    /// | variable | `torchrun` | Open MPI | Slurm | MPICH |
    /// |---|---|---|---|---|
    /// | rank | `RANK`, or `JOB_COMPLETION_INDEX` | `OMPI_COMM_WORLD_RANK` | `SLURM_PROCID` | `PMI_RANK` |
    /// | ranks | `WORLD_SIZE` | `OMPI_COMM_WORLD_SIZE` | `SLURM_STEP_NUM_TASKS`, `SLURM_NTASKS`, or 1 | `PMI_SIZE` |
    /// | rank on its host | `LOCAL_RANK`, or 0 | `OMPI_COMM_WORLD_LOCAL_RANK` | `SLURM_LOCALID` | `MPI_LOCALRANKID` |
    /// | address | `MASTER_ADDR` | `MASTER_ADDR` | `MASTER_ADDR`, or the first host of `SLURM_STEP_NODELIST` or `SLURM_JOB_NODELIST`, or `SLURM_LAUNCH_NODE_IPADDR` | `MASTER_ADDR` |
    /// | port | `MASTER_PORT` | `MASTER_PORT` | `MASTER_PORT`, or one that follows from `SLURM_JOB_ID` and `SLURM_STEP_ID` | `MASTER_PORT` |
    ///
    /// One rank of one needs neither its number nor an address. Without a rank on its host, as in
    /// the pods of Kubeflow, a process is the only rank of its host, unless `LOCAL_WORLD_SIZE`
    /// divides the ranks among hosts.
    ///
    /// If `TORCHELASTIC_USE_AGENT_STORE=True`, `torchrun` itself listens at `MASTER_PORT`, and the
    /// next port is used. The secret consists of the bytes of `STEPSCOPE_GROUP_SECRET`, which need
    /// not be UTF-8. The other variables must be.
    ///
    /// # Errors
    /// [`Error::Misuse`] that names a variable which is missing, not UTF-8 or invalid.
    pub fn from_environment() -> Result<Option<Self>> {
        read(|name| std::env::var_os(name))
    }
}

/// Reads the configuration from `get`. See [`GroupConfig::from_environment`].
fn read(get: impl Fn(&str) -> Option<OsString>) -> Result<Option<GroupConfig>> {
    let is_set = |names: &[&str]| names.iter().any(|name| get(name).is_some());
    let Some(launcher) = LAUNCHERS.iter().find(|launcher| is_set(launcher.marks)) else {
        return Ok(None);
    };
    let variables = Variables { launcher: launcher.name, get };
    let ranks: usize = match variables.first(launcher.ranks)? {
        None if launcher.name == SLURM => 1,
        _ => variables.number(launcher.ranks)?,
    };
    let rank: usize = match variables.first(launcher.rank)? {
        None if ranks == 1 => 0,
        _ => variables.number(launcher.rank)?,
    };
    let local_rank = match variables.first(launcher.local_rank)? {
        None if variables.text("LOCAL_WORLD_SIZE")?.is_some() => {
            rank % variables.number::<NonZeroUsize>(&["LOCAL_WORLD_SIZE"])?
        }
        None => 0,
        _ => variables.number(launcher.local_rank)?,
    };
    if ranks == 0 {
        return Err(misuse(launcher.name, launcher.ranks[0], "1 rank or more", "0"));
    }
    if rank >= ranks {
        let expected = format!("a number below {ranks}, which is {}", launcher.ranks[0]);
        return Err(misuse(launcher.name, launcher.rank[0], &expected, &rank.to_string()));
    }
    let address = if ranks == 1 { String::new() } else { variables.address()? };
    let config = GroupConfig::new(rank, ranks, address).on_host(local_rank);
    Ok(Some(match (variables.get)(SECRET) {
        Some(secret) => config.secret(secret.as_encoded_bytes()),
        None => config,
    }))
}

struct Variables<G> {
    launcher: &'static str,
    get: G,
}

impl<G: Fn(&str) -> Option<OsString>> Variables<G> {
    /// Returns the value of a variable, or none if it is unset or empty.
    fn text(&self, name: &str) -> Result<Option<String>> {
        let Some(value) = (self.get)(name).filter(|value| !value.is_empty()) else { return Ok(None) };
        let not_text = |value: OsString| {
            let got = format!("bytes that are not UTF-8: {}", value.as_encoded_bytes().escape_ascii());
            misuse(self.launcher, name, "text", &got)
        };
        value.into_string().map(Some).map_err(not_text)
    }

    /// Returns the first of these variables that is set, and its value.
    fn first<'n>(&self, names: &[&'n str]) -> Result<Option<(&'n str, String)>> {
        let set = names.iter().map(|&name| Ok(self.text(name)?.map(|value| (name, value))));
        set.filter_map(Result::transpose).next().transpose()
    }

    /// Returns the number in the first of these variables that is set.
    fn number<T: FromStr>(&self, names: &[&str]) -> Result<T> {
        let found = self.first(names)?;
        let (name, got) = found.as_ref().map_or((names[0], "nothing"), |(name, value)| (*name, value.as_str()));
        got.trim().parse().map_err(|_| misuse(self.launcher, name, "a number", got))
    }

    fn address(&self) -> Result<String> {
        let host = match self.text("MASTER_ADDR")? {
            Some(host) => host,
            None if self.launcher == SLURM => self.first_host()?,
            None => return Err(misuse(self.launcher, "MASTER_ADDR", "the host of rank 0", "nothing")),
        };
        let port = match self.text("MASTER_PORT")? {
            None if self.launcher == SLURM => self.slurm_port()?,
            _ => self.number(&["MASTER_PORT"])?,
        };
        if port == 0 {
            return Err(misuse(self.launcher, "MASTER_PORT", "a port from 1 to 65535", "0"));
        }
        // torchrun's agent listens at its own port.
        let port = match self.text("TORCHELASTIC_USE_AGENT_STORE")?.as_deref() {
            Some("True") if port < u16::MAX => port + 1,
            Some("True") => port - 1,
            _ => port,
        };
        let is_ipv6 = host.contains(':') && !host.starts_with('[');
        Ok(if is_ipv6 { format!("[{host}]:{port}") } else { format!("{host}:{port}") })
    }

    fn first_host(&self) -> Result<String> {
        for name in ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"] {
            if let Some(list) = self.text(name)? {
                return first_host(&list).ok_or_else(|| misuse(self.launcher, name, "a list of hosts", &list));
            }
        }
        let names = "MASTER_ADDR, SLURM_JOB_NODELIST or SLURM_LAUNCH_NODE_IPADDR";
        self.text("SLURM_LAUNCH_NODE_IPADDR")?.ok_or_else(|| misuse(self.launcher, names, "a host", "nothing"))
    }

    fn slurm_port(&self) -> Result<u16> {
        let job: u64 = self.number(&["SLURM_JOB_ID"])?;
        let step: u64 = if self.text("SLURM_STEP_ID")?.is_some() { self.number(&["SLURM_STEP_ID"])? } else { 0 };
        let (first, ports) = SLURM_PORTS;
        Ok((first + job.wrapping_add(step.wrapping_mul(STEP_STRIDE)) % ports) as u16)
    }
}

/// Returns the first host of a list in Slurm's format. For example, `gpu[01-03,07],other` begins
/// with `gpu01`.
fn first_host(list: &str) -> Option<String> {
    let (mut host, mut rest) = (String::new(), list.trim());
    loop {
        let end = rest.find(['[', ',']).unwrap_or(rest.len());
        host.push_str(&rest[..end]);
        match rest[end..].strip_prefix('[') {
            None => break,
            Some(numbers) => {
                let (numbers, after) = numbers.split_once(']')?;
                host.push_str(numbers.split(['-', ',']).next()?);
                rest = after;
            }
        }
    }
    let is_name = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
    (!host.is_empty() && host.chars().all(is_name)).then_some(host)
}

fn misuse(launcher: &str, variable: &str, expected: &str, got: &str) -> Error {
    Error::misuse(
        "GroupConfig::from_environment",
        format!("{expected} in {variable} (the variables are those of {launcher})"),
        stepscope_core::internals::short(got).to_string(),
    )
}

#[cfg(test)]
mod tests {
    use super::super::secret::Secret;
    use super::*;

    fn from(variables: &[(&str, &str)]) -> Result<Option<GroupConfig>> {
        read(|name| variables.iter().find(|(of, _)| *of == name).map(|(_, value)| value.into()))
    }

    fn found(variables: &[(&str, &str)]) -> (usize, usize, usize, String) {
        let config = from(variables).expect("the variables are valid").expect("a launcher");
        (config.rank, config.ranks, config.local_rank, config.address)
    }

    fn refused(variables: &[(&str, &str)]) -> String {
        from(variables).expect_err("variables that make no sense").to_string()
    }

    const TORCHRUN: [(&str, &str); 5] =
        [("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1"), ("MASTER_ADDR", "a.b"), ("MASTER_PORT", "29500")];
    const SLURM_STEP: [(&str, &str); 6] = [
        ("SLURM_PROCID", "5"),
        ("SLURM_NTASKS", "8"),
        ("SLURM_LOCALID", "2"),
        ("SLURM_JOB_NODELIST", "gpu[07-09,12],other"),
        ("SLURM_JOB_ID", "1234567"),
        ("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.9"),
    ];

    #[test]
    fn missing_launcher_gives_none() {
        assert!(from(&[]).expect("no error").is_none());
        assert!(from(&[("LOCAL_RANK", "1"), (SECRET, "x"), ("MASTER_ADDR", "h")]).expect("no error").is_none());
    }

    #[test]
    fn torchrun() {
        assert_eq!(found(&TORCHRUN), (3, 4, 1, "a.b:29500".into()));
        // The agent listens at the port.
        let with =
            |port, agent| [&TORCHRUN[..4], &[("MASTER_PORT", port), ("TORCHELASTIC_USE_AGENT_STORE", agent)]].concat();
        assert_eq!(found(&with("29500", "True")).3, "a.b:29501");
        assert_eq!(found(&with("65535", "True")).3, "a.b:65534");
        assert_eq!(found(&with("29500", "False")).3, "a.b:29500");
        let ipv6 = [&TORCHRUN[..3], &[("MASTER_ADDR", "fe80::1"), ("MASTER_PORT", "80")]].concat();
        assert_eq!(found(&ipv6).3, "[fe80::1]:80");
    }

    #[test]
    fn open_mpi() {
        let variables = [
            ("OMPI_COMM_WORLD_RANK", "0"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
            ("MASTER_ADDR", "head"),
            ("MASTER_PORT", "7000"),
        ];
        assert_eq!(found(&variables), (0, 2, 0, "head:7000".into()));
        let error = refused(&variables[..3]);
        assert!(error.contains("MASTER_ADDR") && error.contains("Open MPI"), "{error}");
        // Started by mpirun within a Slurm job.
        assert_eq!(found(&[&SLURM_STEP[..], &variables].concat()).3, "head:7000");
    }

    #[test]
    fn slurm() {
        assert_eq!(found(&SLURM_STEP), (5, 8, 2, format!("gpu07:{}", 15_000 + 1_234_567 % 10_000)));
        let of_step = [&SLURM_STEP[..], &[("SLURM_STEP_ID", "2"), ("SLURM_STEP_NODELIST", "gpu09")]].concat();
        assert_eq!(found(&of_step).3, format!("gpu09:{}", 15_000 + (1_234_567 + 202) % 10_000));
        let named = [&SLURM_STEP[..], &[("MASTER_ADDR", "h"), ("MASTER_PORT", "9")]].concat();
        assert_eq!(found(&named).3, "h:9");
        let without_list = [&SLURM_STEP[..3], &SLURM_STEP[4..]].concat();
        assert!(found(&without_list).3.starts_with("10.0.0.9:"));
        let error = refused(&SLURM_STEP[..3]);
        assert!(error.contains("SLURM_JOB_NODELIST") && error.contains("nothing"), "{error}");
        // Every number gives a port.
        let strange =
            [&SLURM_STEP[..4], &[("SLURM_JOB_ID", "18446744073709551615"), ("SLURM_STEP_ID", "4294967290")]].concat();
        let port: u16 = found(&strange).3.rsplit(':').next().expect("a port").parse().expect("a number");
        assert!((15_000..25_000).contains(&port));
    }

    #[test]
    fn hosts_of_slurm() {
        for (list, host) in [
            ("a", "a"),
            ("a,b", "a"),
            ("gpu[01-03,07],other", "gpu01"),
            ("gpu-[1,3]", "gpu-1"),
            ("rack[1-2]node[3-4].x", "rack1node3.x"),
            ("x[10]-ib,y", "x10-ib"),
        ] {
            assert_eq!(first_host(list).as_deref(), Some(host), "{list}");
        }
        for list in ["", "a[1", "[", "a b", ",a", "a;rm"] {
            assert_eq!(first_host(list), None, "{list}");
        }
    }

    /// One rank needs neither an address nor all variables.
    #[test]
    fn one_rank_needs_no_address() {
        for variables in [
            &[("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")][..],
            &[("WORLD_SIZE", "1")],
            &[("RANK", "0"), ("WORLD_SIZE", "1")],
            &[("WORLD_SIZE", "1"), ("JOB_COMPLETION_INDEX", "0")],
            &[("RANK", ""), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "")],
            &[("OMPI_COMM_WORLD_SIZE", "1")],
            &[("PMI_RANK", "0"), ("PMI_SIZE", "1")],
            // A job script without `-n`, the shell of `srun --pty`, and a step of one task in a
            // larger job.
            &[("SLURM_PROCID", "0"), ("SLURM_LOCALID", "0"), ("SLURM_JOB_ID", "7"), ("SLURM_NNODES", "1")],
            &[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1"), ("SLURM_STEP_ID", "0"), ("SLURM_STEP_NUM_TASKS", "1")],
            &[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8"), ("SLURM_STEP_NUM_TASKS", "1"), ("SLURM_JOB_ID", "7")],
        ] {
            assert_eq!(found(variables), (0, 1, 0, String::new()), "{variables:?}");
        }
        for variables in [
            // The shell of `salloc -n 4`, and a pod of an indexed job without a number of ranks.
            &[("SLURM_JOB_ID", "7"), ("SLURM_NTASKS", "4"), ("SLURM_JOB_NODELIST", "a")][..],
            &[("JOB_COMPLETION_INDEX", "2"), ("LOCAL_RANK", "1")],
        ] {
            assert!(from(variables).expect("no error").is_none(), "{variables:?}");
        }
        assert!(refused(&[("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")]).contains(" in RANK "));
        assert!(refused(&[("RANK", "1"), ("WORLD_SIZE", "1")]).contains("a number below 1, which is WORLD_SIZE"));
        assert!(refused(&[("SLURM_PROCID", "1"), ("SLURM_LOCALID", "1")]).contains("a number below 1"));
    }

    /// Kubeflow, indexed jobs of Kubernetes and MPICH set other variables than torchrun.
    #[test]
    fn ranks_of_other_launchers() {
        let master = [("MASTER_ADDR", "job-0"), ("MASTER_PORT", "23456")];
        for (variables, rank, local_rank) in [
            (&[("RANK", "3"), ("WORLD_SIZE", "4")][..], 3, 0),
            (&[("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2")], 3, 1),
            (&[("JOB_COMPLETION_INDEX", "2"), ("WORLD_SIZE", "4")], 2, 0),
            (&[("RANK", "1"), ("JOB_COMPLETION_INDEX", "2"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1")], 1, 1),
            (&[("PMI_RANK", "3"), ("PMI_SIZE", "4"), ("MPI_LOCALRANKID", "1")], 3, 1),
            (
                &[("SLURM_PROCID", "2"), ("SLURM_NTASKS", "8"), ("SLURM_STEP_NUM_TASKS", "4"), ("SLURM_LOCALID", "1")],
                2,
                1,
            ),
            (&[("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "4")], 1, 0),
        ] {
            let found = found(&[variables, &master].concat());
            assert_eq!(found, (rank, 4, local_rank, "job-0:23456".into()), "{variables:?}");
        }
        let error = refused(&[&[("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "0")], &master[..]].concat());
        assert!(error.contains("LOCAL_WORLD_SIZE"), "{error}");
    }

    #[test]
    fn each_error_names_its_variable() {
        for at in 0..TORCHRUN.len() {
            let (name, _) = TORCHRUN[at];
            let mut variables = TORCHRUN;
            if name != "LOCAL_RANK" {
                variables[at].0 = "OTHER";
                let error = refused(&variables);
                assert!(error.contains(&format!(" in {name} ")) && error.contains("got nothing"), "{name}: {error}");
            }
            if name != "MASTER_ADDR" {
                variables[at] = (name, "-1x\n");
                let error = refused(&variables);
                assert!(error.contains(name) && error.contains("got -1x") && !error.contains('\n'), "{name}: {error}");
            }
        }
        let with = |name, value| TORCHRUN.map(|(of, old)| (of, if of == name { value } else { old }));
        assert!(refused(&with("RANK", "4")).contains("a number below 4, which is WORLD_SIZE"));
        assert!(refused(&with("WORLD_SIZE", "0")).contains("WORLD_SIZE"));
        assert!(refused(&with("MASTER_PORT", "0")).contains("MASTER_PORT"));
        assert!(refused(&with("MASTER_PORT", "65536")).contains("MASTER_PORT"));
    }

    #[test]
    fn the_secret_is_read() {
        let set = [&TORCHRUN[..], &[(SECRET, "0123456789abcdef")]].concat();
        assert!(from(&set).expect("no error").expect("a launcher").secret.is_set());
        assert!(!from(&TORCHRUN).expect("no error").expect("a launcher").secret.is_set());
        // A variable that is set but empty does not mean "only this host". It is refused when the
        // ranks meet.
        let empty = [&TORCHRUN[..], &[(SECRET, "")]].concat();
        assert!(from(&empty).expect("no error").expect("a launcher").check().is_err());
    }

    /// Returns torchrun's variables, one of which has these bytes.
    #[cfg(unix)]
    fn with_bytes(name: &str, value: &[u8]) -> Result<Option<GroupConfig>> {
        use std::os::unix::ffi::OsStrExt;
        let bytes = std::ffi::OsStr::from_bytes(value).to_owned();
        let known = |of: &str| TORCHRUN.iter().find(|(known, _)| *known == of).map(|(_, value)| value.into());
        read(|of| if of == name { Some(bytes.clone()) } else { known(of) })
    }

    #[test]
    #[cfg(unix)]
    fn secrets_are_compared_byte_by_byte() {
        let secret = |value: &[u8]| with_bytes(SECRET, value).unwrap().unwrap().secret;
        let base = [0xff_u8; 16];
        for at in 0..base.len() {
            for byte in [0xfe, 0x80, 0xc0] {
                let mut other = base;
                other[at] = byte;
                assert!(secret(&base) != secret(&other), "byte {at} as {byte:#x}");
            }
        }
        assert!(secret(&base) != secret("\u{fffd}".repeat(16).as_bytes()));
        assert!(secret(&base) == Secret::new(&base), "the environment and the program must give the same secret");
        for (value, bytes) in [(&[0xff; 6][..], 6), (&[0xff; 15], 15), (b"\xf0\x9f\x98", 3), (b"abc\xff", 4)] {
            let error = with_bytes(SECRET, value).unwrap().unwrap().check().unwrap_err().to_string();
            assert!(error.contains(&format!("one of {bytes}")), "{error}");
        }
        assert!(with_bytes(SECRET, &base).unwrap().unwrap().check().is_ok());
    }

    #[test]
    #[cfg(unix)]
    fn other_variables_must_be_text() {
        for (name, _) in TORCHRUN.into_iter().filter(|(name, _)| *name != SECRET) {
            let error = with_bytes(name, b"node\xff7").unwrap_err().to_string();
            assert!(error.contains(&format!("text in {name} ")) && error.contains("node\\xff7"), "{error}");
        }
    }
}
