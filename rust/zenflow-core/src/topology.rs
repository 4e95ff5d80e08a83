//! Which logical CPUs this process may use, which of them share a physical core, and which a NUMA node.
//!
//! Adam is bound by memory, so two hyper-threads of one core gain nothing over one of them: the pool gets
//! one logical CPU a physical core. The default leaves one core to the training thread, which has the
//! accelerator to feed.
//!
//! Three sources, each of which may be missing: the affinity mask (what `taskset`, Slurm or a cpuset allow),
//! the siblings in Linux' sysfs, and [`std::thread::available_parallelism`], which knows cgroup quotas: a
//! container with 4 CPUs' worth of time on a 64-core host has 64 CPUs in its mask, and 64 threads there
//! would spend most of every period throttled.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// Where Linux describes its CPUs.
const SYSFS_CPUS: &str = "/sys/devices/system/cpu";
/// Where it describes its NUMA nodes.
const SYSFS_NODES: &str = "/sys/devices/system/node";

/// The physical cores a process may use, each as the sorted logical CPUs of it that are allowed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    cores: Vec<Vec<usize>>,
    limit: usize,
}

impl Topology {
    /// This process on this machine.
    #[must_use]
    pub fn detect() -> Self {
        Self::read(Path::new(SYSFS_CPUS), &allowed_cpus(), parallelism())
    }

    /// Groups the CPUs in `allowed` by the sysfs tree under `root` (`cpuN/topology/thread_siblings_list`).
    /// A CPU whose file is missing or unreadable counts as a core of its own. `limit` is how many CPUs'
    /// worth of time there is.
    #[must_use]
    pub fn read(root: &Path, allowed: &[usize], limit: usize) -> Self {
        let mut left: BTreeSet<usize> = allowed.iter().copied().collect();
        let mut cores = Vec::new();
        while let Some(cpu) = left.pop_first() {
            let mut core = vec![cpu];
            let file = root.join(format!("cpu{cpu}/topology/thread_siblings_list"));
            let siblings = fs::read_to_string(file).ok().and_then(|text| parse_cpu_list(&text));
            core.extend(siblings.unwrap_or_default().into_iter().filter(|sibling| left.remove(sibling)));
            core.sort_unstable();
            cores.push(core);
        }
        Self { cores, limit }
    }

    /// The physical cores, each as its allowed logical CPUs, in ascending order.
    #[must_use]
    pub fn cores(&self) -> &[Vec<usize>] {
        &self.cores
    }

    /// One logical CPU of every physical core, as far as the time allowed goes. Never empty.
    #[must_use]
    pub fn all_cores(&self) -> Vec<usize> {
        let mut firsts: Vec<usize> = self.cores.iter().map(|core| core[0]).collect();
        firsts.truncate(self.limit.max(1));
        if firsts.is_empty() {
            firsts.push(0);
        }
        firsts
    }

    /// The pool's default: [`all_cores`](Self::all_cores) but one, or that one where there is no other.
    ///
    /// The one left out is the first: it usually takes the interrupts, and on hybrid processors it is a fast
    /// core, as befits the training thread. Under a quota the cores skipped are the last ones, and the one
    /// left out counts towards it.
    #[must_use]
    pub fn default_cores(&self) -> Vec<usize> {
        let mut cores = self.all_cores();
        if cores.len() > 1 {
            cores.remove(0);
        }
        cores
    }
}

/// The NUMA node of each logical CPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Nodes(BTreeMap<usize, usize>);

impl Nodes {
    /// Those of this machine; without sysfs, all CPUs are on one node.
    #[must_use]
    pub fn detect() -> Self {
        Self::read(Path::new(SYSFS_NODES))
    }

    /// As the sysfs tree under `root` has it (`nodeN/cpulist`). What is missing or unreadable there is left out.
    #[must_use]
    pub fn read(root: &Path) -> Self {
        let mut nodes = BTreeMap::new();
        for entry in fs::read_dir(root).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let number = name.to_str().and_then(|name| name.strip_prefix("node")?.parse::<usize>().ok());
            let cpus =
                fs::read_to_string(entry.path().join("cpulist")).ok().and_then(|text| parse_cpu_list(&text));
            if let (Some(node), Some(cpus)) = (number, cpus) {
                nodes.extend(cpus.into_iter().map(|cpu| (cpu, node)));
            }
        }
        Self(nodes)
    }

    /// The node of `cpu`; 0 where it isn't known.
    #[must_use]
    pub fn of(&self, cpu: usize) -> usize {
        self.0.get(&cpu).copied().unwrap_or(0)
    }
}

/// `(cpu, node)` pairs.
impl FromIterator<(usize, usize)> for Nodes {
    fn from_iter<I: IntoIterator<Item = (usize, usize)>>(pairs: I) -> Self {
        Self(pairs.into_iter().collect())
    }
}

/// One logical CPU of every physical core that this process may use. Never empty.
#[must_use]
pub fn all_cores() -> Vec<usize> {
    Topology::detect().all_cores()
}

/// One logical CPU of every physical core that this process may use, all but one. Never empty.
#[must_use]
pub fn default_cores() -> Vec<usize> {
    Topology::detect().default_cores()
}

/// The logical CPUs in this thread's affinity mask, ascending. Where the system doesn't say, as many as
/// there is parallelism, counted from 0. Never empty.
#[must_use]
pub fn allowed_cpus() -> Vec<usize> {
    let mut cpus: Vec<usize> =
        core_affinity::get_core_ids().unwrap_or_default().into_iter().map(|core| core.id).collect();
    cpus.sort_unstable();
    cpus.dedup();
    if cpus.is_empty() {
        cpus = (0..parallelism()).collect();
    }
    cpus
}

fn parallelism() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Reads the kernel's list format, `0-3,8,10-11`. `None` if it is anything else.
fn parse_cpu_list(text: &str) -> Option<Vec<usize>> {
    /// No machine has more; keeps a corrupt range from filling the memory.
    const MOST: usize = 1 << 16;
    let mut cpus = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        if first > last || last >= MOST {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    /// A sysfs tree that lives as long as the value.
    struct FakeSysfs(PathBuf);

    impl FakeSysfs {
        fn new(name: &str, siblings: &[(usize, &str)]) -> Self {
            let root = std::env::temp_dir().join(format!("zenflow-{name}-{}", std::process::id()));
            for (cpu, text) in siblings {
                let dir = root.join(format!("cpu{cpu}/topology"));
                fs::create_dir_all(&dir).unwrap();
                fs::write(dir.join("thread_siblings_list"), text).unwrap();
            }
            Self(root)
        }
    }

    impl Drop for FakeSysfs {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    /// 4 cores with 2 threads, numbered as servers do: n and n + 4.
    fn server() -> FakeSysfs {
        // Tests run side by side, and each has a tree of its own.
        static NEXT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
        let n = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let lines: Vec<String> = (0..8).map(|cpu| format!("{},{}\n", cpu % 4, cpu % 4 + 4)).collect();
        let siblings: Vec<(usize, &str)> = lines.iter().map(String::as_str).enumerate().collect();
        FakeSysfs::new(&format!("server{n}"), &siblings)
    }

    #[test]
    fn siblings_make_one_core() {
        let sysfs = server();
        let all: Vec<usize> = (0..8).collect();
        let topology = Topology::read(&sysfs.0, &all, 8);
        assert_eq!(topology.cores(), [vec![0, 4], vec![1, 5], vec![2, 6], vec![3, 7]]);
        assert_eq!(topology.all_cores(), [0, 1, 2, 3]);
        assert_eq!(topology.default_cores(), [1, 2, 3]);
    }

    #[test]
    fn only_allowed_cpus_are_used() {
        let sysfs = server();
        let topology = Topology::read(&sysfs.0, &[7, 4, 5, 3], 4);
        assert_eq!(topology.cores(), [vec![3, 7], vec![4], vec![5]]);
        assert_eq!(topology.default_cores(), [4, 5]);
        assert_eq!(Topology::read(&sysfs.0, &[6], 1).default_cores(), [6]);
        assert_eq!(Topology::read(&sysfs.0, &[2, 6], 2).default_cores(), [2], "two threads, one core");
    }

    #[test]
    fn a_quota_bounds_the_cores() {
        let sysfs = server();
        let all: Vec<usize> = (0..8).collect();
        let cores = |limit| Topology::read(&sysfs.0, &all, limit).default_cores();
        assert_eq!(cores(3), [1, 2]);
        assert_eq!(cores(2), [1]);
        assert_eq!(cores(1), [0]);
        assert_eq!(cores(0), [0]);
    }

    #[test]
    fn without_sysfs_each_cpu_is_a_core() {
        let nowhere = Path::new("/nonexistent/zenflow");
        let topology = Topology::read(nowhere, &[0, 1, 5], 16);
        assert_eq!(topology.cores(), [vec![0], vec![1], vec![5]]);
        assert_eq!(Topology::read(nowhere, &[], 16).default_cores(), [0], "never empty");

        let torn = FakeSysfs::new("torn", &[(0, "0,x"), (1, ""), (2, "2-9999999999"), (3, "3,9")]);
        assert_eq!(Topology::read(&torn.0, &[0, 1, 2, 3], 4).cores(), [[0], [1], [2], [3]]);
    }

    #[test]
    fn nodes_are_read_from_their_lists() {
        let root = std::env::temp_dir().join(format!("zenflow-nodes-{}", std::process::id()));
        // Node 2 has memory and no CPU; `node3x` and `possible` are no nodes; the torn list is left out.
        let files =
            [("node0", "0-1,8\n"), ("node1", "2-3\n"), ("node2", "\n"), ("node3x", "4"), ("node4", "5-x")];
        for (name, text) in files {
            fs::create_dir_all(root.join(name)).unwrap();
            fs::write(root.join(name).join("cpulist"), text).unwrap();
        }
        fs::write(root.join("possible"), "0-2").unwrap();
        let nodes = Nodes::read(&root);
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(nodes, Nodes::from_iter([(0, 0), (1, 0), (8, 0), (2, 1), (3, 1)]));
        assert_eq!([0, 3, 8, 4, 99].map(|cpu| nodes.of(cpu)), [0, 1, 0, 0, 0]);
        assert_eq!(Nodes::read(Path::new("/nonexistent/zenflow")), Nodes::default());
    }

    #[test]
    fn the_kernels_lists() {
        assert_eq!(parse_cpu_list("0-3,8,10-11\n"), Some(vec![0, 1, 2, 3, 8, 10, 11]));
        assert_eq!(parse_cpu_list("5"), Some(vec![5]));
        for bad in ["", "3-1", "a", "1,,2", "0-70000"] {
            assert_eq!(parse_cpu_list(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn this_machine_has_a_core() {
        let (allowed, cores, all) = (allowed_cpus(), default_cores(), all_cores());
        assert!(!cores.is_empty() && cores.len() <= all.len() && all.len() <= parallelism());
        assert!(cores.iter().all(|cpu| allowed.contains(cpu)), "{cores:?} of {allowed:?}");
    }
}
