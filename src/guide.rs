// If a link or a picture is defined twice, the first definition wins: in rustdoc the pages are
// modules and contain their pictures, in the repository both are files.
#![cfg_attr(not(doctest), doc = include_str!("guide/links.md"))]
#![doc = include_str!("../docs/README.md")]

#[cfg_attr(not(doctest), doc = include_str!("guide/links.md"))]
#[doc = include_str!("../docs/tutorial.md")]
pub mod tutorial {}

#[cfg_attr(not(doctest), doc = include_str!("guide/links.md"))]
#[doc = include_str!("../docs/pictures/rustdoc.md")]
#[doc = include_str!("../docs/windows.md")]
pub mod windows {}

#[cfg_attr(not(doctest), doc = include_str!("guide/links.md"))]
#[doc = include_str!("../docs/keys.md")]
pub mod keys {}

#[cfg_attr(not(doctest), doc = include_str!("guide/links.md"))]
#[doc = include_str!("../docs/behind-a-proxy.md")]
pub mod behind_a_proxy {}

#[cfg_attr(not(doctest), doc = include_str!("guide/links.md"))]
#[doc = include_str!("../docs/configuration.md")]
pub mod configuration {}

#[cfg_attr(not(doctest), doc = include_str!("guide/links.md"))]
#[doc = include_str!("../docs/responses.md")]
pub mod responses {}

#[cfg_attr(not(doctest), doc = include_str!("guide/links.md"))]
#[doc = include_str!("../docs/features.md")]
pub mod features {}

#[cfg_attr(not(doctest), doc = include_str!("guide/links.md"))]
#[doc = include_str!("../docs/support.md")]
pub mod support {}

#[cfg_attr(not(doctest), doc = include_str!("guide/links.md"))]
#[doc = include_str!("../docs/many-nodes.md")]
pub mod many_nodes {}

#[cfg_attr(not(doctest), doc = include_str!("guide/links.md"))]
#[doc = include_str!("../docs/recipes.md")]
pub mod recipes {}

#[cfg_attr(not(doctest), doc = include_str!("guide/links.md"))]
#[doc = include_str!("../docs/ai-api.md")]
pub mod ai_api {}

#[cfg_attr(not(doctest), doc = include_str!("guide/links.md"))]
#[doc = include_str!("../docs/operating.md")]
pub mod operating {}

#[cfg_attr(not(doctest), doc = include_str!("guide/links.md"))]
#[doc = include_str!("../docs/observing.md")]
pub mod observing {}

#[cfg_attr(not(doctest), doc = include_str!("guide/links.md"))]
#[doc = include_str!("../docs/ordering.md")]
pub mod ordering {}

#[cfg_attr(not(doctest), doc = include_str!("guide/links.md"))]
#[doc = include_str!("../docs/other-stacks.md")]
pub mod other_stacks {}

#[cfg_attr(not(doctest), doc = include_str!("guide/links.md"))]
#[doc = include_str!("../docs/testing.md")]
pub mod testing {}

#[cfg_attr(not(doctest), doc = include_str!("guide/links.md"))]
#[doc = include_str!("../docs/moving.md")]
pub mod moving {}

#[cfg_attr(not(doctest), doc = include_str!("guide/links.md"))]
#[doc = include_str!("../docs/semantics.md")]
pub mod semantics {}
