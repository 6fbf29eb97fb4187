//! The memory that cgroups leave to this process: the limit of a container, service or job.
//!
//! The kernel kills processes of a cgroup that has reached its limit, however much memory the host
//! has. Invariant: the limits of the process's cgroup and of all its ancestors apply. The figures
//! are from the cgroup that leaves the least memory.
#![forbid(unsafe_code)]
#![expect(clippy::disallowed_methods, reason = "reads the kernel's own files, which end")]

use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Component, Path, PathBuf};

/// The memory cgroup that leaves this process least.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CgroupMemory {
    /// The version, 1 or 2, which determines the paths and names of its files.
    pub version: u8,
    /// The limit of its processes: `memory.max`, or `memory.high` if that is less, or
    /// `memory.limit_in_bytes` of version 1.
    pub limit_bytes: u64,
    /// The memory of its processes, without the page cache that the kernel can reclaim. That is,
    /// pages of files that are already on disk.
    pub used_bytes: u64,
    /// The part of `used_bytes` that is page cache which the kernel can reclaim after writing it to
    /// disk.
    #[serde(default)]
    pub dirty_bytes: u64,
}

impl CgroupMemory {
    /// Reads the cgroup that applies to this process now. None without a limit, and off Linux.
    pub fn read() -> Option<Self> {
        Cgroups::find(Path::new("/")).tightest()
    }

    /// Returns the bytes that its processes may still take.
    pub fn available_bytes(&self) -> u64 {
        self.limit_bytes.saturating_sub(self.used_bytes)
    }
}

/// The files of a cgroup version.
#[derive(Debug)]
struct Version {
    number: u8,
    /// The type of its file system.
    file_system: &'static str,
    /// The usual mount point, if no other is found.
    usual: &'static str,
    limits: &'static [&'static str],
    usage: &'static str,
    /// The `memory.stat` names of page cache, and of the part that must be written to disk first.
    cache: [&'static str; 2],
    dirty: [&'static str; 2],
}

const VERSIONS: [Version; 2] = [
    Version {
        number: 1,
        file_system: "cgroup",
        usual: "/sys/fs/cgroup/memory",
        limits: &["memory.limit_in_bytes"],
        usage: "memory.usage_in_bytes",
        cache: ["total_inactive_file", "total_active_file"],
        dirty: ["total_dirty", "total_writeback"],
    },
    Version {
        number: 2,
        file_system: "cgroup2",
        usual: "/sys/fs/cgroup",
        limits: &["memory.max", "memory.high"],
        usage: "memory.current",
        cache: ["inactive_file", "active_file"],
        dirty: ["file_dirty", "file_writeback"],
    },
];

/// The value of version 1 for no limit is the largest number of whole pages. No machine has an
/// eighth of it.
const NO_LIMIT: u64 = 1 << 60;

/// The `memory.stat` name, in version 1, of the least limit of the ancestor cgroups, which a
/// container cannot see.
const ABOVE: &str = "hierarchical_memory_limit";

/// The folders of the cgroups that bound this process's memory. They are found once, because a
/// process is seldom moved.
#[derive(Debug)]
pub(crate) struct Cgroups(Vec<(&'static Version, PathBuf)>);

impl Cgroups {
    /// Finds the folders of this process, from the files under `root`.
    pub(crate) fn find(root: &Path) -> Self {
        let text = |name| fs::read_to_string(root.join(name)).unwrap_or_default();
        let (own, mounts) = (text("proc/self/cgroup"), text("proc/self/mountinfo"));
        let folders = |version: &'static Version| {
            let (top, own) = version.place(&own, &mounts);
            // Joined below `root`, because its own path does not include `root`.
            let top = root.join(top.strip_prefix("/").unwrap_or(&top));
            let lowest = top.join(own);
            let above = lowest.ancestors().take_while(|folder| folder.starts_with(&top));
            above.map(|folder| (version, folder.to_owned())).collect::<Vec<_>>()
        };
        Self(VERSIONS.iter().flat_map(folders).collect())
    }

    /// Returns the cgroup that leaves least.
    pub(crate) fn tightest(&self) -> Option<CgroupMemory> {
        let figures = self.0.iter().filter_map(|(version, folder)| version.read(folder));
        figures.min_by_key(CgroupMemory::available_bytes)
    }
}

impl Version {
    /// Returns the mount point of the file system, and this process's folder below it. A container
    /// may see neither. Its own cgroup is then at the usual place.
    fn place(&self, own: &str, mounts: &str) -> (PathBuf, PathBuf) {
        let Some((top, visible)) = mounts.lines().find_map(|line| self.mount(line)) else {
            return (self.usual.into(), PathBuf::new());
        };
        let own = own.lines().find_map(|line| self.own(line)).unwrap_or("/");
        let below = Path::new(own).strip_prefix(visible).unwrap_or(Path::new(""));
        let is_plain = below.components().all(|part| matches!(part, Component::Normal(_)));
        (top, if is_plain { below.to_owned() } else { PathBuf::new() })
    }

    /// Parses a line of `/proc/self/mountinfo` into the mount point and the folder of the file
    /// system that is mounted there.
    fn mount(&self, line: &str) -> Option<(PathBuf, PathBuf)> {
        let (mount, file_system) = line.split_once(" - ")?;
        let mut file_system = file_system.split(' ');
        let has_memory = |options: &str| self.number == 2 || options.split(',').any(|option| option == "memory");
        if file_system.next() != Some(self.file_system) || !file_system.nth(1).is_some_and(has_memory) {
            return None;
        }
        let mut mount = mount.split(' ').skip(3).map(unescaped);
        let visible = mount.next()?;
        Some((mount.next()?.into(), visible.into()))
    }

    /// Parses a line of `/proc/self/cgroup` into this process's folder.
    fn own<'t>(&self, line: &'t str) -> Option<&'t str> {
        let mut parts = line.splitn(3, ':');
        let (number, controllers) = (parts.next()?, parts.next()?);
        let is_this = match self.number {
            1 => controllers.split(',').any(|controller| controller == "memory"),
            _ => number == "0" && controllers.is_empty(),
        };
        parts.next().filter(|_| is_this)
    }

    /// Reads the figures of a folder. None if there is no limit.
    fn read(&self, folder: &Path) -> Option<CgroupMemory> {
        let number = |name: &str| fs::read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
        // Any value other than digits, such as `max`, means no limit.
        let stat = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
        let sum = |names: [&str; 2]| {
            let of = |line: &str| line.split_once(' ').filter(|(name, _)| names.contains(name))?.1.parse::<u64>().ok();
            stat.lines().filter_map(of).reduce(u64::saturating_add)
        };
        let limits = self.limits.iter().filter_map(|name| number(name)).chain(sum([ABOVE; 2]));
        let limit_bytes = limits.filter(|&limit| limit < NO_LIMIT).min()?;
        let (cache_bytes, dirty_bytes) = (sum(self.cache).unwrap_or(0), sum(self.dirty).unwrap_or(0));
        let used_bytes = number(self.usage)?.saturating_sub(cache_bytes.saturating_sub(dirty_bytes));
        let dirty_bytes = dirty_bytes.min(cache_bytes).min(used_bytes);
        Some(CgroupMemory { version: self.number, limit_bytes, used_bytes, dirty_bytes })
    }
}

/// Decodes a path of `/proc/self/mountinfo`, where a blank is `\040`.
fn unescaped(path: &str) -> String {
    let mut parts = path.split('\\');
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let code = part.get(..3).and_then(|code| u8::from_str_radix(code, 8).ok());
        match code {
            Some(code) => plain.extend([char::from(code)].into_iter().chain(part[3..].chars())),
            None => plain.extend(['\\'].into_iter().chain(part.chars())),
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GIB: u64 = 1 << 30;
    /// `/proc/self/mountinfo` of a host with both versions, as on Debian 10, and of one with only
    /// version 2.
    const BOTH: &str = "24 18 0:22 / /sys/fs/cgroup ro,nosuid shared:9 - tmpfs tmpfs ro,mode=755\n\
                        25 24 0:23 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate\n\
                        29 24 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
                        30 24 0:28 / /sys/fs/cgroup/memory rw shared:11 - cgroup cgroup rw,memory\n";
    const UNIFIED: &str = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";

    /// Returns the figures that these files give.
    fn tightest(files: &[(&str, &str)]) -> Option<CgroupMemory> {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        Cgroups::find(root.path()).tightest()
    }

    fn of(version: u8, limit_bytes: u64, used_bytes: u64) -> Option<CgroupMemory> {
        with_dirty(version, limit_bytes, used_bytes, 0)
    }

    fn with_dirty(version: u8, limit_bytes: u64, used_bytes: u64, dirty_bytes: u64) -> Option<CgroupMemory> {
        Some(CgroupMemory { version, limit_bytes, used_bytes, dirty_bytes })
    }

    #[test]
    fn version_2_excludes_clean_page_cache() {
        let figures = tightest(&[
            ("proc/self/cgroup", "0::/system.slice/train.service\n"),
            ("proc/self/mountinfo", UNIFIED),
            ("sys/fs/cgroup/system.slice/train.service/memory.max", "1000000\n"),
            ("sys/fs/cgroup/system.slice/train.service/memory.high", "max\n"),
            ("sys/fs/cgroup/system.slice/train.service/memory.current", "700000\n"),
            (
                "sys/fs/cgroup/system.slice/train.service/memory.stat",
                "anon 300000\nfile 400000\nfile_dirty 50000\nfile_writeback 7\ninactive_file 250000\nactive_file 100000\nslab 9\n",
            ),
        ]);
        assert_eq!(figures, with_dirty(2, 1_000_000, 700_000 - (350_000 - 50_007), 50_007));
        assert_eq!(figures.unwrap().available_bytes(), 1_000_000 - 400_007);
    }

    #[test]
    fn a_cgroup_above_may_leave_less() {
        let files = |of_parent: &'static str| {
            [
                ("proc/self/cgroup", "1:name=systemd:/\n0::/a/b/c\n"),
                ("proc/self/mountinfo", UNIFIED),
                ("sys/fs/cgroup/a/b/c/memory.max", "1000000"),
                ("sys/fs/cgroup/a/b/c/memory.current", "10"),
                ("sys/fs/cgroup/a/b/memory.max", "max"),
                ("sys/fs/cgroup/a/b/memory.current", "20"),
                ("sys/fs/cgroup/a/memory.max", of_parent),
                ("sys/fs/cgroup/a/memory.current", "600000"),
            ]
        };
        assert_eq!(
            tightest(&files("1200000")),
            of(2, 1_200_000, 600_000),
            "the cgroup above is the tightest, because its other members use it"
        );
        assert_eq!(tightest(&files("2000000")), of(2, 1_000_000, 10));
        assert_eq!(tightest(&files("max")), of(2, 1_000_000, 10));
        assert_eq!(tightest(&files("600")).unwrap().available_bytes(), 0, "use above the limit leaves nothing");
    }

    #[test]
    fn memory_high_is_a_limit_too() {
        let figures = tightest(&[
            ("proc/self/cgroup", "0::/\n"),
            ("proc/self/mountinfo", UNIFIED),
            ("sys/fs/cgroup/memory.max", "max"),
            ("sys/fs/cgroup/memory.high", "5000"),
            ("sys/fs/cgroup/memory.current", "4000"),
        ]);
        assert_eq!(figures, of(2, 5000, 4000));
    }

    #[test]
    fn version_1_wins_if_both_mounted() {
        let files = |limit: &'static str| {
            [
                ("proc/self/cgroup", "5:cpu,cpuacct:/elsewhere\n4:memory,hugetlb:/job/7\n0::/other\n"),
                ("proc/self/mountinfo", BOTH),
                ("sys/fs/cgroup/memory/job/7/memory.limit_in_bytes", limit),
                ("sys/fs/cgroup/memory/job/7/memory.usage_in_bytes", "900"),
                (
                    "sys/fs/cgroup/memory/job/7/memory.stat",
                    "inactive_file 1\ntotal_inactive_file 200\ntotal_dirty 50\n",
                ),
                ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
                ("sys/fs/cgroup/memory/memory.usage_in_bytes", "99999999"),
            ]
        };
        assert_eq!(tightest(&files("4096\n")), with_dirty(1, 4096, 750, 50));
        assert_eq!(tightest(&files("9223372036854771712\n")), None, "the largest number of pages is no limit");
        let stat = ("sys/fs/cgroup/memory/job/7/memory.stat", "hierarchical_memory_limit 2048\ntotal_dirty 50\n");
        let hidden = files("4096").map(|file| if file.0 == stat.0 { stat } else { file });
        assert_eq!(tightest(&hidden), of(1, 2048, 900), "the limit of a hidden cgroup above counts");
    }

    #[test]
    fn containers_find_their_own_cgroup() {
        // Docker without a cgroup namespace has the host's path, and that folder is mounted. In a
        // namespace the path is `/`. The third process was moved out of its cgroup.
        let mount = "30 23 0:26 /docker/ab /sys/fs/cgroup ro - cgroup2 cgroup rw\n";
        for (own, mount) in [("0::/docker/ab\n", mount), ("0::/\n", UNIFIED), ("0::/../cd\n", UNIFIED), ("", mount)] {
            let figures = tightest(&[
                ("proc/self/cgroup", own),
                ("proc/self/mountinfo", mount),
                ("sys/fs/cgroup/memory.max", "8589934592\n"),
                ("sys/fs/cgroup/memory.current", "1073741824\n"),
            ]);
            assert_eq!(figures, of(2, 8 * GIB, GIB), "{own:?}");
        }
    }

    #[test]
    fn hidden_files_leave_the_usual_places() {
        let unified = [("sys/fs/cgroup/memory.max", "77"), ("sys/fs/cgroup/memory.current", "7")];
        assert_eq!(tightest(&unified), of(2, 77, 7));
        let first = ("sys/fs/cgroup/memory/memory.limit_in_bytes", "66");
        let usage = ("sys/fs/cgroup/memory/memory.usage_in_bytes", "6");
        assert_eq!(tightest(&[first, usage]), of(1, 66, 6));
        assert_eq!(tightest(&[first]), None, "a limit without a usage file is ignored");
        assert_eq!(tightest(&[]), None);
    }

    #[test]
    fn a_mount_point_may_have_blanks() {
        assert_eq!(unescaped(r"/a\040b\134c\09"), "/a b\\c\\09");
        let figures = tightest(&[
            ("proc/self/cgroup", "0::/my job\n"),
            ("proc/self/mountinfo", "30 23 0:26 / /mnt/c\\040g rw - cgroup2 none rw\n"),
            ("mnt/c g/my job/memory.max", "5"),
            ("mnt/c g/my job/memory.current", "2"),
        ]);
        assert_eq!(figures, of(2, 5, 2));
    }

    #[test]
    fn this_process_can_be_asked() {
        if let Some(figures) = CgroupMemory::read() {
            assert!(figures.limit_bytes > 0 && matches!(figures.version, 1 | 2), "{figures:?}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_skipped(own: String, mounts: String, value: String) {
            let line = |number| format!("{number} 23 0:26 {value} /sys/fs/cgroup rw - cgroup2 none rw\n{mounts}");
            for mounts in [&mounts, &line(1)] {
                tightest(&[
                    ("proc/self/cgroup", &own),
                    ("proc/self/mountinfo", mounts),
                    ("sys/fs/cgroup/memory.max", &value),
                    ("sys/fs/cgroup/memory.current", "3"),
                    ("sys/fs/cgroup/memory.stat", &own),
                ]);
            }
        }
    }
}
