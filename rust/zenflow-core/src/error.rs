//! The closed list of what can go wrong in the core.

/// A specialised result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Every failure the core reports. Nothing is changed when one is returned, unless its text says so.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument is outside what the call accepts.
    #[error("{name} is {value}; accepted: {accepted}")]
    InvalidArgument {
        /// The argument's name, as the caller knows it.
        name: &'static str,
        /// The value that was given.
        value: String,
        /// What would have been taken.
        accepted: &'static str,
    },
    /// The system refused memory.
    #[error("could not allocate {bytes} bytes for {purpose}: {cause}")]
    OutOfMemory {
        /// Bytes wanted.
        bytes: usize,
        /// What they were wanted for.
        purpose: &'static str,
        /// The system's own words.
        cause: String,
    },
    /// A thread could not be started.
    #[error("could not start {wanted} for the CPU optimizer: {cause}")]
    Thread {
        /// How many threads, of which kind.
        wanted: String,
        /// The system's own words.
        cause: String,
    },
    /// The engine was closed before this call.
    #[error("the engine is closed; create a new optimizer to go on")]
    Closed,
    /// The worker died; the states it was working on are not to be trusted.
    #[error("the engine's worker failed and its states can't be trusted: {cause}")]
    Poisoned {
        /// The first failure, as the worker saw it.
        cause: String,
    },
    /// A forked child used an engine or a pool whose threads live in its parent.
    #[error(
        "process {child} was forked from process {parent}, whose threads it doesn't have; \
         build the optimizer in the process that uses it"
    )]
    Forked {
        /// Process that created the threads.
        parent: u32,
        /// Process that made the call.
        child: u32,
    },
}

impl Error {
    /// Shorthand for [`Error::InvalidArgument`].
    #[allow(clippy::needless_pass_by_value)] // callers give literals and temporaries
    pub fn invalid(name: &'static str, value: impl ToString, accepted: &'static str) -> Self {
        Self::InvalidArgument { name, value: value.to_string(), accepted }
    }
}
