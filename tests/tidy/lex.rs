//! As much of Rust's lexical structure as the rules need: each line split into its code and its comments, literals
//! blanked.
//!
//! Blanked text keeps its columns and lines, so that a finding can name them. Handled are line comments, nested block
//! comments, strings with escapes, raw and byte strings, and character literals as opposed to lifetimes.

/// A source file, line by line.
#[derive(Debug)]
pub(crate) struct Source {
    /// From the root of the repository, with forward slashes.
    pub(crate) path: String,
    /// The lines as they are.
    pub(crate) lines: Vec<String>,
    /// The lines with comments and the contents of literals blanked.
    pub(crate) code: Vec<String>,
    /// The comments of each line, with the code blanked.
    pub(crate) comments: Vec<String>,
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    Code,
    LineComment,
    BlockComment(usize),
    Text,
    RawText(usize),
}

impl Source {
    pub(crate) fn new(path: &str, text: &str) -> Self {
        let chars: Vec<char> = text.chars().collect();
        let (mut code, mut comments) = (String::new(), String::new());
        let (mut state, mut at) = (State::Code, 0);
        while at < chars.len() {
            let (next, len, is_code) = step(state, &chars[at..], at.checked_sub(1).map(|before| chars[before]));
            for &char in &chars[at..(at + len).min(chars.len())] {
                let comment = matches!(state, State::LineComment | State::BlockComment(_))
                    || matches!(next, State::LineComment | State::BlockComment(_));
                code.push(if char == '\n' || is_code { char } else { ' ' });
                comments.push(if char == '\n' || comment { char } else { ' ' });
            }
            (state, at) = (next, at + len);
        }
        let split = |text: &str| text.lines().map(str::to_owned).collect();
        Self {
            path: path.to_owned(),
            lines: split(text),
            code: split(&code),
            comments: split(&comments),
        }
    }

    /// The code as one text.
    pub(crate) fn joined(&self) -> String {
        self.code.join("\n")
    }
}

/// The state after the next few characters, how many they are, and whether they are code.
fn step(state: State, rest: &[char], before: Option<char>) -> (State, usize, bool) {
    let starts = |what: &str| what.chars().enumerate().all(|(i, c)| rest.get(i) == Some(&c));
    match state {
        State::Code if starts("//") => (State::LineComment, 2, false),
        State::Code if starts("/*") => (State::BlockComment(1), 2, false),
        State::Code if rest[0] == '"' => (State::Text, 1, true),
        State::Code if !before.is_some_and(is_word) && raw_start(rest).is_some() => {
            let (len, hashes) = raw_start(rest).unwrap_or_default();
            (State::RawText(hashes), len, true)
        }
        State::Code if rest[0] == '\'' => (State::Code, char_literal(rest), char_literal(rest) == 1),
        State::Code => (State::Code, 1, true),
        State::LineComment if rest[0] == '\n' => (State::Code, 1, false),
        State::LineComment => (State::LineComment, 1, false),
        State::BlockComment(depth) if starts("/*") => (State::BlockComment(depth + 1), 2, false),
        State::BlockComment(1) if starts("*/") => (State::Code, 2, false),
        State::BlockComment(depth) if starts("*/") => (State::BlockComment(depth - 1), 2, false),
        State::BlockComment(depth) => (State::BlockComment(depth), 1, false),
        State::Text if rest[0] == '\\' => (State::Text, 2, false),
        State::Text if rest[0] == '"' => (State::Code, 1, true),
        State::Text => (State::Text, 1, false),
        State::RawText(hashes) if rest[0] == '"' && rest[1..].iter().take_while(|&&c| c == '#').count() >= hashes => {
            (State::Code, 1 + hashes, true)
        }
        State::RawText(hashes) => (State::RawText(hashes), 1, false),
    }
}

/// `r"`, `r#"`, `br##"` and the like: the number of characters, and of hashes.
fn raw_start(rest: &[char]) -> Option<(usize, usize)> {
    let prefix = rest.iter().take_while(|&&c| c == 'b' || c == 'c').count();
    if prefix > 1 || rest.get(prefix) != Some(&'r') {
        return None;
    }
    let hashes = rest[prefix + 1..].iter().take_while(|&&c| c == '#').count();
    (rest.get(prefix + 1 + hashes) == Some(&'"')).then_some((prefix + 2 + hashes, hashes))
}

/// The length of a character literal; 1 for the quote of a lifetime.
fn char_literal(rest: &[char]) -> usize {
    match rest {
        ['\'', '\\', _, tail @ ..] => tail.iter().position(|&c| c == '\'').map_or(1, |end| end + 4),
        ['\'', _, '\'', ..] => 3,
        _ => 1,
    }
}

pub(crate) fn is_word(char: char) -> bool {
    char.is_alphanumeric() || char == '_'
}

/// The byte offsets at which `word` occurs in `text` as a whole word.
pub(crate) fn find_word<'a>(text: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    text.match_indices(word).map(|(at, _)| at).filter(move |&at| {
        let clear = |char: Option<char>| !char.is_some_and(is_word);
        clear(text[..at].chars().next_back()) && clear(text[at + word.len()..].chars().next())
    })
}

/// The line, from 1, that contains the byte at `offset`.
pub(crate) fn line_of(text: &str, offset: usize) -> usize {
    text[..offset].matches('\n').count() + 1
}

/// The text between the bracket at `open` and its partner.
pub(crate) fn bracketed(text: &str, open: usize) -> &str {
    let mut depth = 0;
    for (at, char) in text[open..].char_indices() {
        match char {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return &text[open + 1..open + at];
        }
    }
    &text[open + 1..]
}
