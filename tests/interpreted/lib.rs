//! Nothing: a package needs a target to which its tests belong.
