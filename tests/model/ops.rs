//! Operations on a heap, and how bytes encode them.

/// One step. Indices are taken modulo the number of objects; a step that makes no sense at the moment does nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    Allocate {
        pages: usize,
    },
    /// `1 << shift` bytes.
    Aligned {
        pages: usize,
        shift: u32,
    },
    At {
        page: usize,
        pages: usize,
    },
    /// A run, or part of it: `pages` of it from its page `from`; zero is all.
    Free {
        run: usize,
        from: usize,
        pages: usize,
    },
    FreeBatch {
        run: usize,
        runs: usize,
    },
    Extend {
        run: usize,
        by: usize,
    },
    Shrink {
        run: usize,
        to: usize,
    },
    /// Frees what is free or does not exist: must be refused.
    Misuse {
        page: usize,
        pages: usize,
    },
    /// Frees a batch with the same run in it twice: must be refused.
    Twice {
        run: usize,
    },
    Lend,
    CacheAllocate {
        cache: usize,
        pages: usize,
    },
    CacheFree {
        cache: usize,
        run: usize,
    },
    CacheFlush {
        cache: usize,
    },
    CacheDrop {
        cache: usize,
    },
    ShardAllocate {
        shard: usize,
        pages: usize,
    },
    ShardFree {
        shard: usize,
        run: usize,
    },
    FlushShards,
    Limit {
        pages: usize,
    },
    Scavenge {
        pages: usize,
    },
    Settle,
}

/// A length: mostly a few pages, often about a word, sometimes about a chunk and more.
fn pages(byte: u8) -> usize {
    let near = |unit: usize, byte: u8| unit * (1 + usize::from(byte) / 3) + usize::from(byte % 3) - 1;
    match byte {
        0..=127 => usize::from(byte) % 18,
        128..=191 => usize::from(byte) - 118,
        192..=223 => near(64, byte - 192),
        224..=255 => near(256, byte - 224),
    }
}

impl Op {
    fn decode([kind, a, b, c]: [u8; 4]) -> Self {
        let (run, cache, shard) = (usize::from(a), usize::from(a), usize::from(a));
        let page = usize::from(u16::from_le_bytes([a, b]));
        match kind % 64 {
            0..=10 => Self::Allocate { pages: pages(b) },
            11..=13 => Self::Aligned {
                pages: pages(b),
                shift: u32::from(c) % 24,
            },
            14..=16 => Self::At {
                page: page % 8192,
                pages: pages(c),
            },
            17..=22 => Self::Free { run, from: 0, pages: 0 },
            23..=25 => Self::Free {
                run,
                from: usize::from(b),
                pages: pages(c),
            },
            26..=27 => Self::FreeBatch {
                run,
                runs: usize::from(b) % 16,
            },
            28..=29 => Self::Extend { run, by: pages(b) },
            30..=31 => Self::Shrink { run, to: pages(b) },
            32 => Self::Misuse {
                page: page % 16384,
                pages: pages(c),
            },
            33 => Self::Twice { run },
            34..=35 => Self::Lend,
            36..=42 => Self::CacheAllocate { cache, pages: pages(b) },
            43..=46 => Self::CacheFree {
                cache,
                run: usize::from(b),
            },
            47 => Self::CacheFlush { cache },
            48 => Self::CacheDrop { cache },
            49..=52 => Self::ShardAllocate { shard, pages: pages(b) },
            53..=55 => Self::ShardFree {
                shard,
                run: usize::from(b),
            },
            56 => Self::FlushShards,
            57..=59 => Self::Limit { pages: page % 12288 },
            60..=62 => Self::Scavenge { pages: page },
            _ => Self::Settle,
        }
    }
}

/// Decodes steps from any bytes, four for each.
pub fn decode(bytes: &[u8]) -> Vec<Op> {
    bytes.as_chunks().0.iter().copied().map(Op::decode).collect()
}
