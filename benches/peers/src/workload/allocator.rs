//! The program's allocator: the only thing in which the programs differ.

/// The name of this program's allocator in tables.
pub const NAME: &str = if cfg!(feature = "ours") {
    "pageheap"
} else if cfg!(feature = "mimalloc2") {
    "mimalloc2"
} else if cfg!(feature = "mimalloc3") {
    "mimalloc3"
} else if cfg!(feature = "jemalloc") {
    "jemalloc"
} else if cfg!(feature = "snmalloc") {
    "snmalloc"
} else if cfg!(feature = "rpmalloc") {
    "rpmalloc"
} else if cfg!(feature = "rusty_alloc") {
    "rusty_alloc"
} else if cfg!(feature = "talc") {
    "talc"
} else if cfg!(feature = "tcmalloc") {
    "tcmalloc"
} else {
    "glibc"
};

#[cfg(feature = "ours")]
#[global_allocator]
static ALLOCATOR: pageheap::GlobalHeap = pageheap::GlobalHeap::new();

#[cfg(any(feature = "mimalloc2", feature = "mimalloc3"))]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[cfg(feature = "jemalloc")]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

#[cfg(feature = "snmalloc")]
#[global_allocator]
static ALLOCATOR: snmalloc_rs::SnMalloc = snmalloc_rs::SnMalloc;

#[cfg(feature = "rpmalloc")]
#[global_allocator]
static ALLOCATOR: rpmalloc::RpMalloc = rpmalloc::RpMalloc;

#[cfg(feature = "rusty_alloc")]
#[global_allocator]
static ALLOCATOR: rusty_alloc_api::RustyAlloc = rusty_alloc_api::RustyAlloc;

/// Talc takes its memory from the program; here, as in its own example, from the system allocator.
#[cfg(feature = "talc")]
#[global_allocator]
static ALLOCATOR: talc::TalcLock<spinning_top::RawSpinlock, talc::source::GlobalAllocSource<std::alloc::System>> =
    talc::TalcLock::new(talc::source::GlobalAllocSource::new(std::alloc::System));

#[cfg(feature = "tcmalloc")]
#[global_allocator]
static ALLOCATOR: tcmalloc_better::TCMalloc = tcmalloc_better::TCMalloc;
