//! Reads the environment variables that launchers set.

#![forbid(unsafe_code)]

use super::config::GroupConfig;
use std::ffi::OsString;
use std::str::FromStr;
use stepscope_core::error::{Error, Result};

/// The variable of the secret.
const SECRET: &str = "STEPSCOPE_GROUP_SECRET";

/// The variables of a launcher: rank, number of ranks, rank on its host.
struct Launcher {
    name: &'static str,
    rank: &'static str,
    ranks: &'static str,
    local_rank: &'static str,
}

/// The launchers in the order of the search. A launcher that another one starts comes first.
const LAUNCHERS: [Launcher; 3] = [
    Launcher { name: "torchrun", rank: "RANK", ranks: "WORLD_SIZE", local_rank: "LOCAL_RANK" },
    Launcher {
        name: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        ranks: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    },
    Launcher { name: SLURM, rank: "SLURM_PROCID", ranks: "SLURM_NTASKS", local_rank: "SLURM_LOCALID" },
];
const SLURM: &str = "Slurm";

/// The first port that is derived from Slurm's numbers, and the number of such ports. They lie
/// below those that systems hand out.
const SLURM_PORTS: (u64, u64) = (15_000, 10_000);
/// The distance between the ports of a job's steps.
const STEP_STRIDE: u64 = 101;

impl GroupConfig {
    /// Reads the configuration that `torchrun`, Open MPI or Slurm set in environment variables, in
    /// this order. `None` without any of them.
    ///
    /// | variable | `torchrun` | Open MPI | Slurm |
    /// |---|---|---|---|
    /// | rank | `RANK` | `OMPI_COMM_WORLD_RANK` | `SLURM_PROCID` |
    /// | ranks | `WORLD_SIZE` | `OMPI_COMM_WORLD_SIZE` | `SLURM_NTASKS` |
    /// | rank on its host | `LOCAL_RANK` | `OMPI_COMM_WORLD_LOCAL_RANK` | `SLURM_LOCALID` |
    /// | address | `MASTER_ADDR` | `MASTER_ADDR` | `MASTER_ADDR`, or the first host of `SLURM_STEP_NODELIST` or `SLURM_JOB_NODELIST`, or `SLURM_LAUNCH_NODE_IPADDR` |
    /// | port | `MASTER_PORT` | `MASTER_PORT` | `MASTER_PORT`, or one that follows from `SLURM_JOB_ID` and `SLURM_STEP_ID` |
    ///
    /// If `TORCHELASTIC_USE_AGENT_STORE=True`, `torchrun` itself listens at `MASTER_PORT`, and the
    /// next port is used. A single rank needs no address. The secret consists of the bytes of
    /// `STEPSCOPE_GROUP_SECRET`, which need not be UTF-8. The other variables must be.
    ///
    /// # Errors
    /// [`Error::Misuse`] that names a variable which is missing, not UTF-8 or invalid.
    pub fn from_environment() -> Result<Option<Self>> {
        read(|name| std::env::var_os(name))
    }
}

/// Reads the configuration from `get`. See [`GroupConfig::from_environment`].
fn read(get: impl Fn(&str) -> Option<OsString>) -> Result<Option<GroupConfig>> {
    let Some(launcher) =
        LAUNCHERS.iter().find(|launcher| get(launcher.rank).is_some() || get(launcher.ranks).is_some())
    else {
        return Ok(None);
    };
    let variables = Variables { launcher: launcher.name, get };
    let rank: usize = variables.number(launcher.rank)?;
    let ranks: usize = variables.number(launcher.ranks)?;
    let local_rank = variables.number(launcher.local_rank)?;
    if ranks == 0 {
        return Err(misuse(launcher.name, launcher.ranks, "1 rank or more", "0"));
    }
    if rank >= ranks {
        let expected = format!("a number below {ranks}, which is {}", launcher.ranks);
        return Err(misuse(launcher.name, launcher.rank, &expected, &rank.to_string()));
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

    fn number<T: FromStr>(&self, name: &str) -> Result<T> {
        let got = self.text(name)?;
        let number = got.as_deref().and_then(|text| text.trim().parse().ok());
        number.ok_or_else(|| misuse(self.launcher, name, "a number", got.as_deref().unwrap_or("nothing")))
    }

    fn address(&self) -> Result<String> {
        let host = match self.text("MASTER_ADDR")? {
            Some(host) => host,
            None if self.launcher == SLURM => self.first_host()?,
            None => return Err(misuse(self.launcher, "MASTER_ADDR", "the host of rank 0", "nothing")),
        };
        let port = match self.text("MASTER_PORT")? {
            None if self.launcher == SLURM => self.slurm_port()?,
            _ => self.number("MASTER_PORT")?,
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
        let job: u64 = self.number("SLURM_JOB_ID")?;
        let step: u64 = if self.text("SLURM_STEP_ID")?.is_some() { self.number("SLURM_STEP_ID")? } else { 0 };
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
                let (numbers, behind) = numbers.split_once(']')?;
                host.push_str(numbers.split(['-', ',']).next()?);
                rest = behind;
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
        stepscope_core::error::short(got).to_string(),
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
        let config = from(variables).expect("variables that make sense").expect("a launcher");
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

    #[test]
    fn one_rank_needs_no_address() {
        assert_eq!(found(&[("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")]), (0, 1, 0, String::new()));
    }

    #[test]
    fn each_error_names_its_variable() {
        for at in 0..TORCHRUN.len() {
            let (name, _) = TORCHRUN[at];
            let mut variables = TORCHRUN;
            variables[at].0 = "OTHER";
            let error = refused(&variables);
            assert!(error.contains(&format!(" in {name} ")) && error.contains("got nothing"), "{name}: {error}");
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
        assert!(secret(&base) == Secret::new(&base), "by the environment or by the program");
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
