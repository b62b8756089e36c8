//! The repository's own rules, for sources and pages: they read files and run nothing.

mod direction;
mod layout;
mod options;
mod other_stacks;
mod pages;
mod tour;
mod tutorial;
