//! Which process something was born in.
//!
//! `fork` copies memory but not threads. A child (a `DataLoader` worker, say) therefore inherits an engine
//! whose worker it doesn't have, and locks that nobody in it will ever open. Whatever owns threads keeps a
//! [`Birth`] and asks it before it waits for one of them: the child gets an error where it would hang.

use crate::error::{Error, Result};

/// Remembers the process that created something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Birth {
    pid: u32,
}

impl Birth {
    /// Born here and now.
    #[must_use]
    pub fn here() -> Self {
        Self { pid: std::process::id() }
    }

    /// Refuses to go on in a forked child. Costs one `getpid`, well under a microsecond.
    ///
    /// # Errors
    ///
    /// [`Error::Forked`] in any process but the one of [`Birth::here`].
    #[inline]
    pub fn check(self) -> Result<()> {
        let child = std::process::id();
        if child == self.pid {
            return Ok(());
        }
        Err(Error::Forked { parent: self.pid, child })
    }

    /// Whether this is the process of [`Birth::here`]; for destructors, which can't return an error.
    #[must_use]
    pub fn is_here(self) -> bool {
        self.check().is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn at_home() {
        assert_eq!(Birth::here().check(), Ok(()));
        assert!(Birth::here().is_here());
    }

    #[test]
    fn elsewhere_both_processes_are_named() {
        let birth = Birth { pid: std::process::id() + 1 };
        let error = birth.check().unwrap_err();
        assert_eq!(error, Error::Forked { parent: birth.pid, child: std::process::id() });
        assert!(!birth.is_here());
    }

    #[cfg(unix)]
    #[test]
    fn a_forked_child_is_told() {
        let birth = Birth::here();
        // SAFETY: the child calls nothing but `getpid` and `_exit`, both async-signal-safe, as a child of a
        // threaded process must.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let code = i32::from(birth.is_here());
            // SAFETY: ends the child without running anything of the parent's.
            unsafe { libc::_exit(code) };
        }
        assert!(child > 0, "fork failed");
        let mut status = -1;
        // SAFETY: `status` is a live `c_int`, and the child is ours and not yet waited for.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "status {status:#x}");
        assert_eq!(birth.check(), Ok(()), "the parent is still itself");
    }
}
