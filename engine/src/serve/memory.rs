//! How much memory may this process still take?
//!
//! The least of what the machine has available and what each control group above this process
//! leaves: in a container the machine's own figure says nothing. Page cache that could be dropped
//! counts as available in both.

use std::fs;
use std::path::{Path, PathBuf};

/// Where control groups are mounted.
const CGROUPS: &str = "/sys/fs/cgroup";

/// What is available, and who says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Available {
    pub(super) bytes: u64,
    pub(super) of: Of,
}

/// Whose memory it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Of {
    /// The machine's.
    Machine,
    /// The control group's: a container's limit, say.
    Cgroup,
}

impl std::fmt::Display for Of {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Machine => "this machine",
            Self::Cgroup => "this process's control group",
        })
    }
}

/// What this process may still take, where the operating system tells it.
pub(super) fn available() -> Option<Available> {
    let meminfo = fs::read_to_string("/proc/meminfo").ok();
    let machine = meminfo.as_deref().and_then(machine_available);
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let cgroup = group_folders(&groups)
        .iter()
        .filter_map(|folder| group_available(folder))
        .min();
    least(machine, cgroup)
}

fn least(machine: Option<u64>, cgroup: Option<u64>) -> Option<Available> {
    let machine = machine.map(|bytes| Available {
        bytes,
        of: Of::Machine,
    });
    let cgroup = cgroup.map(|bytes| Available {
        bytes,
        of: Of::Cgroup,
    });
    [machine, cgroup]
        .into_iter()
        .flatten()
        .min_by_key(|available| available.bytes)
}

fn machine_available(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// The folders of the groups that this process is in, their parents too: any of them may limit it.
/// `/proc/self/cgroup` has a line for each hierarchy, `number:controllers:path`; the one without
/// controllers is of version 2.
fn group_folders(groups: &str) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else {
            continue;
        };
        let root = if controllers.is_empty() {
            PathBuf::from(CGROUPS)
        } else if controllers.split(',').any(|name| name == "memory") {
            Path::new(CGROUPS).join("memory")
        } else {
            continue;
        };
        // Inside a container the path may be that outside: its parents, down to the root that the
        // container sees, are tried as well, and those that are not there say nothing.
        let own = root.join(path.trim_start_matches('/'));
        let within = own
            .ancestors()
            .take_while(|folder| folder.starts_with(&root));
        folders.extend(within.map(Path::to_path_buf));
    }
    folders
}

fn group_available(folder: &Path) -> Option<u64> {
    let read = |name: &str| fs::read_to_string(folder.join(name)).ok();
    let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
    // Version 2 says "max" where there is no limit; version 1 a number larger than any machine.
    let limit = number("memory.max").or_else(|| number("memory.limit_in_bytes"))?;
    let used = number("memory.current").or_else(|| number("memory.usage_in_bytes"))?;
    let droppable = read("memory.stat").and_then(|stat| inactive_file(&stat));
    Some(limit.saturating_sub(used.saturating_sub(droppable.unwrap_or(0))))
}

/// Page cache of the group, its children's included, that nobody used lately.
fn inactive_file(stat: &str) -> Option<u64> {
    let field = |name: &str| {
        let mut rows = stat.lines().filter_map(|line| line.split_once(' '));
        rows.find(|(key, _)| *key == name)?.1.trim().parse().ok()
    };
    field("total_inactive_file").or_else(|| field("inactive_file"))
}

#[cfg(test)]
mod tests {
    //! Catches a container's limit that is not seen, and page cache that counts as taken.
    use super::*;

    #[test]
    fn the_machine() {
        let meminfo = "MemTotal:  100 kB\nMemFree: 5 kB\nMemAvailable:   64 kB\n";
        assert_eq!(machine_available(meminfo), Some(65_536));
        assert_eq!(machine_available("MemTotal: 1 kB"), None);
        assert!(available().is_some_and(|a| a.bytes > 0), "it is told here");
    }

    #[test]
    fn groups_and_their_parents() {
        let folders = |groups: &str| -> Vec<String> {
            let folders = group_folders(groups);
            folders.iter().map(|f| f.display().to_string()).collect()
        };
        assert_eq!(
            folders("0::/a/b\n"),
            ["/sys/fs/cgroup/a/b", "/sys/fs/cgroup/a", "/sys/fs/cgroup"]
        );
        assert_eq!(
            folders("9:cpu:/x\n4:hugetlb,memory:/y\nnonsense\n"),
            ["/sys/fs/cgroup/memory/y", "/sys/fs/cgroup/memory"]
        );
    }

    #[test]
    fn a_group_leaves_what_it_has_not_used() {
        let folder = tempfile::tempdir().expect("a folder");
        let write = |name: &str, text: &str| {
            fs::write(folder.path().join(name), text).expect("it can be written");
        };
        assert_eq!(group_available(folder.path()), None);
        write("memory.max", "max\n");
        write("memory.current", "700\n");
        assert_eq!(group_available(folder.path()), None, "no limit");
        write("memory.max", "1000\n");
        assert_eq!(group_available(folder.path()), Some(300));
        write("memory.stat", "anon 400\nfile 300\ninactive_file 250\n");
        assert_eq!(group_available(folder.path()), Some(550));
        write("memory.stat", "inactive_file 1\ntotal_inactive_file 200\n");
        assert_eq!(group_available(folder.path()), Some(500));
    }

    #[test]
    fn the_least_counts() {
        let rows = [
            (None, None, None),
            (Some(5), None, Some((5, Of::Machine))),
            (Some(5), Some(3), Some((3, Of::Cgroup))),
            (Some(2), Some(3), Some((2, Of::Machine))),
        ];
        for (machine, cgroup, expected) in rows {
            let found = least(machine, cgroup).map(|a| (a.bytes, a.of));
            assert_eq!(found, expected);
        }
    }
}
