//! Go's choice of the next chunk to scavenge. This crate has no such policy; it is kept here so that Go's recordings
//! can be replayed.

/// Pages in a chunk.
const CHUNK: usize = 512;

/// A chunk with fewer pages in use than this is not dense.
const DENSE: usize = CHUNK * 31 / 32;

#[derive(Clone, Copy, Debug, Default)]
struct Chunk {
    in_use: usize,
    /// Pages in use when its generation began.
    before: usize,
    generation: u32,
    has_free: bool,
}

/// Where a search for a chunk starts.
#[derive(Clone, Copy, Debug, Default)]
struct Cursor {
    page: Option<usize>,
    /// A free moved the cursor here, and no search has moved it on since.
    marked: bool,
}

/// What the policy knows about a heap.
#[derive(Debug)]
pub struct Index {
    chunks: Vec<Chunk>,
    generation: u32,
    forced: Cursor,
    background: Cursor,
    /// The highest page freed in this generation.
    highest: Option<usize>,
}

impl Index {
    pub fn new(chunks: usize) -> Self {
        Self {
            chunks: vec![Chunk::default(); chunks],
            generation: 0,
            forced: Cursor::default(),
            background: Cursor::default(),
            highest: None,
        }
    }

    /// Calls `visit` for each chunk of a run, with the number of the run's pages in it and the last of them.
    fn each(&mut self, page: usize, pages: usize, mut visit: impl FnMut(&mut Self, usize, usize, usize)) {
        let (mut page, end) = (page, page + pages);
        while page < end {
            let next = ((page / CHUNK + 1) * CHUNK).min(end);
            visit(self, page / CHUNK, next - page, next - 1);
            page = next;
        }
    }

    fn touch(&mut self, chunk: usize) -> &mut Chunk {
        let generation = self.generation;
        let chunk = &mut self.chunks[chunk];
        if chunk.generation != generation {
            (chunk.before, chunk.generation) = (chunk.in_use, generation);
        }
        chunk
    }

    pub fn allocate(&mut self, page: usize, pages: usize) {
        self.each(page, pages, |index, chunk, pages, _| {
            let chunk = index.touch(chunk);
            chunk.in_use += pages;
            chunk.has_free &= chunk.in_use < CHUNK;
        });
    }

    pub fn free(&mut self, page: usize, pages: usize) {
        self.each(page, pages, |index, chunk, pages, last| {
            let chunk = index.touch(chunk);
            chunk.in_use -= pages;
            chunk.has_free = true;
            index.highest = index.highest.max(Some(last));
            if index.forced.page < Some(last) {
                index.forced = Cursor {
                    page: Some(last),
                    marked: true,
                };
            }
        });
    }

    pub fn next_generation(&mut self) {
        self.generation += 1;
        if self.background.page < self.highest {
            self.background = Cursor {
                page: self.highest,
                marked: true,
            };
        }
        self.highest = None;
    }

    /// Resets the cursors, as if no page had ever been freed.
    pub fn reset(&mut self) {
        (self.forced, self.background, self.highest) = (Cursor::default(), Cursor::default(), None);
    }

    /// Marks a chunk as having nothing left to scavenge.
    pub fn set_empty(&mut self, chunk: usize) {
        self.chunks[chunk].has_free = false;
    }

    /// The next chunk to scavenge, and the page in it to start at.
    pub fn find(&mut self, force: bool) -> Option<(usize, usize)> {
        let cursor = if force { self.forced } else { self.background };
        let page = cursor.page?;
        let worth = |chunk: &Chunk| {
            let sparse = chunk.in_use < DENSE && (chunk.generation != self.generation || chunk.before < DENSE);
            chunk.has_free && (force || sparse)
        };
        let hit = (0..=page / CHUNK).rev().find(|&chunk| worth(&self.chunks[chunk]));
        let next = match hit {
            Some(chunk) if chunk == page / CHUNK => return Some((chunk, page % CHUNK)),
            Some(chunk) => Cursor {
                page: Some(chunk * CHUNK + CHUNK - 1),
                marked: false,
            },
            None if cursor.marked => cursor,
            None => Cursor::default(),
        };
        *if force { &mut self.forced } else { &mut self.background } = next;
        hit.map(|chunk| (chunk, CHUNK - 1))
    }
}
