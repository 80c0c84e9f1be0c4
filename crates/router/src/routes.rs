//! The paths that the router knows, and what is done with a request to each. It is one table, which
//! docs/routing.md shows as well.

use crate::request::Endpoint;
use http::{Method, StatusCode};

/// What is done with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// It goes to an engine that the policy chooses by caches and load.
    Cache(Endpoint),
    /// It goes to the engine with the fewest requests in flight.
    Load,
    /// The router answers itself.
    Own(OwnPage),
    /// The router answers itself, whoever shows the admin token.
    Admin(AdminPage),
    /// It is refused with this status, for this reason.
    Refuse(StatusCode, &'static str),
}

/// What the router answers itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OwnPage {
    /// Can requests be served?
    Health,
    Metrics,
    /// The last decisions.
    Decisions,
    /// The models of all engines.
    Models,
    Model,
}

/// What is done about the engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdminPage {
    /// They are listed.
    Engines,
    /// One is added or removed.
    Engine,
    /// One drains.
    Drain,
}

/// Paths with one rule.
#[derive(Debug)]
pub struct Group {
    /// The paths. What is in braces stands for anything that is not empty.
    pub paths: &'static [&'static str],
    /// The methods; HEAD goes where GET goes. Refused paths are refused with any.
    pub methods: &'static [Method],
    pub rule: Rule,
}

const GET: &[Method] = &[Method::GET];
const POST: &[Method] = &[Method::POST];
const GET_AND_POST: &[Method] = &[Method::GET, Method::POST];

const PUT_AND_DELETE: &[Method] = &[Method::PUT, Method::DELETE];

const MANAGEMENT: &str = "it manages or shows one engine: ask that engine itself";
const ONE_ENGINE: &str = "what it is about is kept by one engine, and the router does not know by which";

/// All paths, those with the most requests first.
pub const ROUTES: &[Group] = &[
    group(&["/v1/chat/completions"], POST, Rule::Cache(Endpoint::ChatCompletions)),
    group(&["/v1/completions"], POST, Rule::Cache(Endpoint::Completions)),
    group(&["/v1/responses"], POST, Rule::Cache(Endpoint::Responses)),
    group(&["/v1/messages"], POST, Rule::Cache(Endpoint::Messages)),
    group(
        &[
            "/v1/embeddings",
            "/v2/embed",
            "/pooling",
            "/classify",
            "/score",
            "/v1/score",
            "/rerank",
            "/v1/rerank",
            "/v2/rerank",
            "/tokenize",
            "/detokenize",
            "/v1/messages/count_tokens",
            "/v1/chat/completions/render",
            "/v1/completions/render",
            "/v1/audio/transcriptions",
            "/v1/audio/translations",
            "/inference/v1/generate",
            "/invocations",
            "/generate",
            "/encode",
        ],
        POST,
        Rule::Load,
    ),
    group(&["/version", "/tokenizer_info", "/get_model_info", "/model_info"], GET, Rule::Load),
    group(&["/health"], GET, Rule::Own(OwnPage::Health)),
    group(&["/ping"], GET_AND_POST, Rule::Own(OwnPage::Health)),
    group(&["/v1/models"], GET, Rule::Own(OwnPage::Models)),
    group(&["/v1/models/{model}"], GET, Rule::Own(OwnPage::Model)),
    group(&["/metrics"], GET, Rule::Own(OwnPage::Metrics)),
    group(&["/debug/decisions"], GET, Rule::Own(OwnPage::Decisions)),
    group(&["/admin/engines"], GET, Rule::Admin(AdminPage::Engines)),
    group(&["/admin/engines/{name}/drain"], POST, Rule::Admin(AdminPage::Drain)),
    group(&["/admin/engines/{name}"], PUT_AND_DELETE, Rule::Admin(AdminPage::Engine)),
    group(
        &["/v1/responses/{id}", "/v1/files", "/v1/files/{id}", "/v1/batches", "/v1/batches/{id}"],
        &[],
        Rule::Refuse(StatusCode::NOT_FOUND, ONE_ENGINE),
    ),
    group(
        &["/v1/realtime"],
        &[],
        Rule::Refuse(StatusCode::NOT_FOUND, "connections that change their protocol are not routed"),
    ),
    group(
        &[
            "/sleep",
            "/wake_up",
            "/is_sleeping",
            "/pause",
            "/resume",
            "/is_paused",
            "/reset_prefix_cache",
            "/reset_mm_cache",
            "/reset_encoder_cache",
            "/collective_rpc",
            "/v1/load_lora_adapter",
            "/v1/unload_lora_adapter",
            "/load_lora_adapter",
            "/unload_lora_adapter",
            "/init_weight_transfer_engine",
            "/update_weights",
            "/update_weights_from_disk",
            "/scale_elastic_ep",
            "/is_scaling_elastic_ep",
            "/start_profile",
            "/stop_profile",
            "/abort_requests",
            "/abort_request",
            "/flush_cache",
            "/release_memory_occupation",
            "/resume_memory_occupation",
            "/load",
            "/get_load",
            "/server_info",
            "/get_server_info",
        ],
        &[],
        Rule::Refuse(StatusCode::FORBIDDEN, MANAGEMENT),
    ),
];

const fn group(paths: &'static [&'static str], methods: &'static [Method], rule: Rule) -> Group {
    Group { paths, methods, rule }
}

/// The group that a path belongs to.
pub fn find(path: &str) -> Option<&'static Group> {
    ROUTES.iter().find(|group| group.paths.iter().any(|known| matches(known, path)))
}

fn matches(known: &str, path: &str) -> bool {
    named(known, path).is_some()
}

/// What stands in a path for the braces of a known one; nothing where it has none.
pub fn named<'a>(known: &str, path: &'a str) -> Option<&'a str> {
    let Some((before, after)) = known.split_once('{') else { return (known == path).then_some("") };
    let after = after.split_once('}').map_or("", |(_, after)| after);
    path.strip_prefix(before)?.strip_suffix(after).filter(|named| !named.is_empty())
}

impl Group {
    /// Does it take this method?
    pub fn takes(&self, method: &Method) -> bool {
        self.methods.contains(method) || (method == Method::HEAD && self.methods.contains(&Method::GET))
    }

    /// The methods that it takes, for people and for the `allow` header.
    pub fn allowed(&self) -> String {
        self.methods.iter().map(Method::as_str).collect::<Vec<_>>().join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn a_path_has_one_rule_and_unknown_ones_have_none() {
        let all: Vec<&str> = ROUTES.iter().flat_map(|group| group.paths).copied().collect();
        assert_eq!(all.iter().collect::<HashSet<_>>().len(), all.len());
        assert_eq!(find("/v1/models/Qwen/Qwen3-0.6B").unwrap().rule, Rule::Own(OwnPage::Model));
        assert_eq!(find("/v1/models").unwrap().rule, Rule::Own(OwnPage::Models));
        for unknown in ["/", "/v1/models/", "//sleep", "/sleep/", "/v1/sleep", "/v1/completions/", "/docs"] {
            assert!(find(unknown).is_none(), "{unknown}");
        }
        assert_eq!(find("/admin/engines/a/drain").unwrap().rule, Rule::Admin(AdminPage::Drain));
        assert_eq!(find("/admin/engines/a").unwrap().rule, Rule::Admin(AdminPage::Engine));
        let cached = find("/v1/completions").unwrap();
        assert!(cached.takes(&Method::POST) && !cached.takes(&Method::GET) && !cached.takes(&Method::HEAD));
        assert!(find("/version").unwrap().takes(&Method::HEAD));
    }

    /// The table as docs/routing.md has it.
    fn table() -> String {
        let row = |group: &Group| {
            let paths: Vec<String> = group.paths.iter().map(|path| format!("`{path}`")).collect();
            let methods = if group.methods.is_empty() { "any".to_owned() } else { group.allowed() };
            let rule = match group.rule {
                Rule::Cache(_) => "by cache and load".to_owned(),
                Rule::Load => "by load".to_owned(),
                Rule::Own(own) => format!("the router: {}", of_own(own)),
                Rule::Admin(page) => format!("the router, with its admin token: {}", of_admin(page)),
                Rule::Refuse(status, reason) => format!("refused with {}: {reason}", status.as_u16()),
            };
            format!("| {} | {methods} | {rule} |\n", paths.join(", "))
        };
        ROUTES.iter().map(row).collect()
    }

    fn of_admin(page: AdminPage) -> &'static str {
        match page {
            AdminPage::Engines => "the engines, and how each takes part",
            AdminPage::Engine => "adds an engine, or removes it",
            AdminPage::Drain => "an engine finishes what it has and gets nothing new",
        }
    }

    fn of_own(own: OwnPage) -> &'static str {
        match own {
            OwnPage::Health => "200 while at least one engine is up, else 503",
            OwnPage::Metrics => "Prometheus text",
            OwnPage::Decisions => {
                "the last 256 decisions: scores and state of every candidate, the rule that settled it, how it ended"
            }
            OwnPage::Models => "the models of all engines that are up",
            OwnPage::Model => "one of them",
        }
    }

    #[test]
    fn the_documentation_shows_the_table_as_it_is() {
        let page = include_str!("../../../docs/routing.md");
        assert!(page.contains(&table()), "docs/routing.md must contain\n{}", table());
    }
}
