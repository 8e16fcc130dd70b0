//! The checks: their names, what they test, and in which process they run.

use warpwire::mem::MemoryKind::{self, Plain, Pool, Vmm};

use super::{CheckResult, CheckTarget, data, lifetime, processes};

pub(super) type Check = fn(&CheckTarget) -> CheckResult;

/// How a check is run.
#[derive(Clone, Copy)]
pub(super) enum Run {
    /// In this process.
    InProcess(Check),
    /// In a child process, because it forks.
    InChild(Check),
    /// Never, for this reason.
    Waived(&'static str),
}

/// A check on one kind of memory.
#[derive(Clone, Copy)]
pub(super) struct Case {
    check: &'static str,
    pub(super) about: &'static str,
    kind: Option<MemoryKind>,
    pub(super) run: Run,
}

impl Case {
    /// The check's name, with the kind of memory if it runs on several.
    pub(super) fn name(&self) -> String {
        match self.kind {
            Some(kind) => format!("{}_{kind}", self.check),
            None => self.check.to_owned(),
        }
    }

    pub(super) fn has_name(&self, name: &str) -> bool {
        self.check == name || self.name() == name
    }

    pub(super) fn kind(&self) -> MemoryKind {
        self.kind.unwrap_or(Plain)
    }
}

const ALL: &[MemoryKind] = &[Plain, Vmm, Pool];
const PLAIN_AND_VMM: &[MemoryKind] = &[Plain, Vmm];
const ANY_KIND: &[MemoryKind] = &[];

const NO_TOKENS: &str =
    "windows use no P2P tokens: drivers with persistent pinning do not need them";
const NO_SESSION: &str = "a window has no session descriptor that could be passed to another \
    process: each is opened and owned by one process";
const NO_FORCED_PCIE: &str = "forcing PCIe is not implemented: it concerns platforms with a \
    coherent CPU-GPU link, of which none was available";

type CheckRow = (&'static str, &'static [MemoryKind], &'static str, Run);

/// In the order of gdrcopy_sanity's list, each under a comment with its name there; checks that
/// gdrcopy does not have follow.
const CHECKS: &[CheckRow] = &[
    // basic, basic_v2
    (
        "a_window_opens_and_closes",
        ALL,
        "open and close; the window has the requested range",
        Run::InProcess(data::opens_and_closes),
    ),
    // basic_v2_forcepci
    (
        "a_window_can_be_forced_over_pcie",
        ANY_KIND,
        "mapping over PCIe where a coherent link exists",
        Run::Waived(NO_FORCED_PCIE),
    ),
    // basic_with_tokens
    ("peer_tokens_open_a_window", ANY_KIND, "mapping by P2P tokens", Run::Waived(NO_TOKENS)),
    // basic_unaligned_mapping
    (
        "unaligned_ranges_have_windows",
        ALL,
        "any offset and length; freeing a neighbour changes nothing",
        Run::InProcess(data::unaligned_ranges),
    ),
    // basic_small_buffers_mapping
    (
        "small_neighbours_have_windows_of_their_own",
        ALL,
        "buffers of 8 bytes that share a page",
        Run::InProcess(data::small_neighbours),
    ),
    // basic_child_thread_pins_buffer
    (
        "threads_open_use_and_close_windows",
        PLAIN_AND_VMM,
        "open in one thread, use in another, close in a third; two concurrently on one buffer",
        Run::InProcess(lifetime::across_threads),
    ),
    // data_validation, data_validation_v2
    (
        "the_device_sees_what_the_cpu_wrote",
        ALL,
        "1000 writes through the window, each read back with the device's copy",
        Run::InProcess(data::device_sees_cpu),
    ),
    (
        "the_cpu_sees_what_the_device_wrote",
        ALL,
        "a kernel's pattern, read through the window",
        Run::InProcess(data::cpu_sees_device),
    ),
    (
        "odd_offsets_copy_exactly",
        ALL,
        "10 offsets in words and bytes, of the window, the host and both",
        Run::InProcess(data::odd_offsets),
    ),
    // data_validation_v2_forcepci
    (
        "forced_pcie_windows_hold_the_same_data",
        ANY_KIND,
        "data through a window forced over PCIe",
        Run::Waived(NO_FORCED_PCIE),
    ),
    // data_validation_mix_mappings
    (
        "mapping_types_agree",
        ANY_KIND,
        "write-combining and cached windows of one buffer show the same",
        Run::InProcess(data::mapping_types_agree),
    ),
    // invalidation_access_after_gdr_close
    (
        "a_closed_window_faults",
        PLAIN_AND_VMM,
        "an access after closing is a fault",
        Run::InProcess(processes::closed_window_faults),
    ),
    // invalidation_access_after_free
    (
        "freed_memory_stays_readable",
        ALL,
        "a window shows the freed memory's data until it is closed",
        Run::InProcess(lifetime::after_free),
    ),
    // invalidation_two_mappings
    (
        "freeing_one_leaves_the_other",
        PLAIN_AND_VMM,
        "two buffers with windows; one is freed",
        Run::InProcess(lifetime::two_windows),
    ),
    // invalidation_fork_access_after_free
    (
        "a_stale_window_never_shows_another_process",
        PLAIN_AND_VMM,
        "another process allocates memory after ours was freed",
        Run::InProcess(processes::stale_window),
    ),
    // invalidation_fork_after_gdr_map
    (
        "a_forked_child_cannot_touch_the_window",
        PLAIN_AND_VMM,
        "the child faults, the parent continues",
        Run::InChild(processes::fork_and_touch),
    ),
    // invalidation_fork_child_gdr_map_parent
    (
        "a_forked_child_cannot_open_a_window",
        PLAIN_AND_VMM,
        "the child is refused its parent's memory",
        Run::InChild(processes::fork_and_open),
    ),
    // invalidation_fork_map_and_free
    (
        "a_forked_childs_free_leaves_the_window",
        PLAIN_AND_VMM,
        "the child frees, the parent's window still works",
        Run::InChild(processes::fork_and_free),
    ),
    // invalidation_unix_sock_shared_fd_gdr_pin_buffer
    (
        "a_passed_descriptor_cannot_pin",
        ANY_KIND,
        "pinning by another process's session",
        Run::Waived(NO_SESSION),
    ),
    // invalidation_unix_sock_shared_fd_gdr_map
    (
        "a_passed_descriptor_cannot_map",
        ANY_KIND,
        "mapping by another process's session",
        Run::Waived(NO_SESSION),
    ),
    // invalidation_fork_child_gdr_pin_parent_with_tokens
    (
        "a_child_cannot_use_its_parents_tokens",
        ANY_KIND,
        "pinning by another process's tokens",
        Run::Waived(NO_TOKENS),
    ),
    // attributes_sanity
    (
        "a_window_reports_its_path",
        ANY_KIND,
        "its path and mapping type; a reason for each refused path",
        Run::InProcess(data::reports_path),
    ),
    // leakage_pin_pages_fork
    (
        "a_killed_process_leaves_nothing_behind",
        PLAIN_AND_VMM,
        "device memory is freed after a process with windows was killed",
        Run::InProcess(processes::killed_with_windows),
    ),
    (
        "ten_thousand_windows_leave_nothing_behind",
        ANY_KIND,
        "from 8 threads: no descriptor and no mapping is left",
        Run::InProcess(lifetime::ten_thousand),
    ),
    (
        "every_routine_copies_exactly",
        ANY_KIND,
        "each kind of copy instructions of the CPU, at many offsets and lengths",
        Run::InProcess(data::every_routine),
    ),
    (
        "the_best_method_copies_exactly",
        ALL,
        "the library's choice, from 1 byte to 4 MiB, in both directions",
        Run::InProcess(data::best_method),
    ),
    (
        "single_words_are_atomic",
        ANY_KIND,
        "words and atomics through the window",
        Run::InProcess(data::single_words),
    ),
    (
        "a_running_kernel_sees_cpu_writes",
        PLAIN_AND_VMM,
        "a kernel that polls device memory replies to every write",
        Run::InProcess(data::running_kernel),
    ),
    (
        "wrong_ranges_are_refused",
        ANY_KIND,
        "empty, too long, past the end, host memory, freed memory: an error each",
        Run::InProcess(data::wrong_ranges),
    ),
];

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (check, kinds, about, run) in CHECKS {
        let case = |kind| Case { check, about, kind, run: *run };
        match kinds.is_empty() {
            true => cases.push(case(None)),
            false => cases.extend(kinds.iter().map(|kind| case(Some(*kind)))),
        }
    }
    cases
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique() {
        let mut names: Vec<String> = cases().iter().map(Case::name).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
        assert!(count >= 37, "gdrcopy has 37, this has {count}");
    }
}
