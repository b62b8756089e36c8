//! The guide, a page for each subject: the [front page](crate#features) says by task which to read.

// If a link or a picture is defined twice, the first definition wins: in rustdoc the pages are
// modules and contain their pictures, in the repository both are files.

macro_rules! pages {
    ($($page:ident: $($text:literal)+;)*) => {$(
        #[cfg_attr(not(doctest), doc = include_str!("guide/links.md"))]
        $(#[doc = include_str!($text)])+
        pub mod $page {}
    )*};
}

pages! {
    tutorial: "../docs/tutorial.md";
    windows: "../docs/pictures/rustdoc.md" "../docs/windows.md";
    keys: "../docs/keys.md";
    behind_a_proxy: "../docs/behind-a-proxy.md";
    configuration: "../docs/configuration.md";
    responses: "../docs/responses.md";
    features: "../docs/features.md";
    many_nodes: "../docs/many-nodes.md";
    recipes: "../docs/recipes.md";
    ai_api: "../docs/ai-api.md";
    operating: "../docs/operating.md";
    observing: "../docs/observing.md";
    ordering: "../docs/ordering.md";
    other_stacks: "../docs/other-stacks.md";
    testing: "../docs/testing.md";
    trouble: "../docs/trouble.md";
}

/// The rules by number, S1 to S42, are published with the suite that checks stores against them:
/// [`tower_fixed_window_conformance::rules`].
///
/// [`tower_fixed_window_conformance::rules`]:
///     https://docs.rs/tower-fixed-window-conformance/latest/tower_fixed_window_conformance/rules/
pub mod semantics {}
