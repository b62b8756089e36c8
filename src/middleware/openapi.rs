//! Describes the responses of a layer as OpenAPI objects.

use std::any::Any;

use http::StatusCode;
use serde_json::{Map, Value, json};

use super::headers::Headers;
use super::layer::FixedWindowLayer;
use super::rejection::{GitHubBody, Grpc, ProblemJson, QUOTA_EXCEEDED};
use crate::limits::Limiter;

impl<J: 'static> FixedWindowLayer<J> {
    /// Returns the responses that this layer sends itself, by their status, as [response objects]
    /// of OpenAPI 3.1. Add them to the operations behind the layer. [The
    /// guide](crate::guide::responses#openapi) has an example, and names programs that use `utoipa`
    /// and `aide`.
    ///
    /// 429 (or the layer's [`status`](Self::status)) is a refusal; 400 and 500 are for requests
    /// without a key. 503 is included if the store is shared or has a deadline, or if requests wait
    /// in a queue. Add the `content` of an [`on_reject`](Self::on_reject) closure yourself. OpenAPI
    /// can't describe [`Grpc`]: for it, the object is empty.
    ///
    /// [response objects]: https://spec.openapis.org/oas/v3.1.1.html#response-object
    pub fn openapi_responses(&self) -> Value {
        let reject: &dyn Any = &*self.reject;
        let mut responses = Map::new();
        if reject.is::<Grpc>() {
            return responses.into();
        }
        let (status, headers) =
            (self.options.status.unwrap_or(StatusCode::TOO_MANY_REQUESTS), refusal_headers(self));
        let refusal =
            response("The rate limit is exceeded.", headers, content(reject, status, true));
        responses.insert(status.as_str().to_owned(), refusal);

        let mut add_failure = |status: StatusCode, description, may_retry| {
            let headers = common_headers(may_retry);
            let failure = response(description, headers, content(reject, status, false));
            match responses.get_mut(status.as_str()) {
                Some(refusal) => either(refusal, &failure),
                None => _ = responses.insert(status.as_str().to_owned(), failure),
            }
        };
        let lacks_key = "The request lacks what its rate limit counts by.";
        add_failure(StatusCode::BAD_REQUEST, lacks_key, false);
        let is_misconfigured = "The rate limit of this server is misconfigured.";
        add_failure(StatusCode::INTERNAL_SERVER_ERROR, is_misconfigured, false);
        let store = self.limits.common_store();
        if self.options.queue.is_some() || store.is_shared() || store.remote().is_some() {
            let is_unavailable = "The rate limit can't be checked, or the server is shutting down.";
            add_failure(StatusCode::SERVICE_UNAVAILABLE, is_unavailable, true);
        }
        responses.into()
    }
}

fn response(description: &str, headers: Value, content: Option<Value>) -> Value {
    let mut response = json!({ "description": description, "headers": headers });
    if let Some(content) = content {
        response["content"] = content;
    }
    response
}

/// Joins a refusal and a failure with one status: what only the refusal has is optional, and the
/// type is either's.
fn either(refusal: &mut Value, failure: &Value) {
    let both = [&refusal["description"], &failure["description"]]
        .map(|of| of.as_str().unwrap_or_default());
    refusal["description"] = both.join(" Or: ").into();
    for (name, header) in refusal["headers"].as_object_mut().into_iter().flatten() {
        if failure["headers"].get(name).is_none() {
            header["required"] = json!(false);
        }
    }
    // To index it would add a `null`.
    let content = refusal.get_mut("content").and_then(Value::as_object_mut);
    for (media, body) in content.into_iter().flatten() {
        body["schema"]["required"] = failure["content"][media]["schema"]["required"].clone();
        let kinds = body.pointer_mut("/schema/properties/type/enum").and_then(Value::as_array_mut);
        if let Some(kinds) = kinds.filter(|kinds| kinds.len() < 2) {
            kinds.push("about:blank".into());
        }
    }
}

fn content(reject: &dyn Any, status: StatusCode, is_refusal: bool) -> Option<Value> {
    let mut properties = json!({ "message": { "type": "string" } });
    let media = if reject.is::<GitHubBody>() {
        "application/json"
    } else if reject.is::<ProblemJson>() {
        let kind = if is_refusal { QUOTA_EXCEEDED } else { "about:blank" };
        // Not `const`, which OpenAPI 3.0 and some libraries lack.
        properties["type"] = json!({ "type": "string", "enum": [kind] });
        properties["title"] = json!({ "type": "string" });
        properties["status"] = json!({ "type": "integer", "enum": [status.as_u16()] });
        if is_refusal {
            let text = json!({ "type": "string" });
            properties["violated-policies"] = json!({ "type": "array", "items": text });
        }
        "application/problem+json"
    } else {
        return None;
    };
    let required: Vec<_> = properties.as_object()?.keys().cloned().collect();
    // Absent if waiting does not help.
    if reject.is::<ProblemJson>() {
        properties["retry_after"] = json!({ "type": "integer", "minimum": 1 });
    }
    let schema = json!({ "type": "object", "properties": properties, "required": required });
    Some(json!({ media: { "schema": schema } }))
}

/// The headers of each style by the beginnings of their names: some are of one limit, or of each.
const HEADERS: [(&str, &str, &str); 8] = [
    ("x-ratelimit-limit", "The requests, or tokens, of a window.", "integer"),
    ("x-ratelimit-remaining", "How many of them are left.", "integer"),
    ("x-ratelimit-used", "How many of them are used.", "integer"),
    ("x-ratelimit-resource", "The name of the limit.", "string"),
    ("x-ratelimit-reset-", "When the window ends, such as `6m0s`.", "string"),
    ("x-ratelimit-reset", "When the window ends, in seconds since the Unix epoch, UTC.", "integer"),
    ("ratelimit-", "The quotas, as in draft-ietf-httpapi-ratelimit-headers-10.", "string"),
    ("ratelimit", "What is left of them, as in the same draft.", "string"),
];

fn refusal_headers<J>(layer: &FixedWindowLayer<J>) -> Value {
    let names = layer.limits.limiters.iter().map(Limiter::name);
    let resources: Vec<_> = names.clone().filter(|name| !name.is_empty()).collect();
    let mut headers = common_headers(true);
    // Absent if waiting does not help.
    headers["retry-after"]["required"] = json!(false);
    for name in layer.options.headers.names(names) {
        let known = HEADERS.iter().find(|(begin, ..)| name.as_str().starts_with(begin));
        let Some((begin, description, kind)) = known else { continue };
        let schema = match (*begin, *kind) {
            ("x-ratelimit-resource", _) if resources.is_empty() => continue,
            ("x-ratelimit-resource", _) => json!({ "type": "string", "enum": resources }),
            (_, "integer") => json!({ "type": "integer", "minimum": 0 }),
            (_, kind) => json!({ "type": kind }),
        };
        headers[name.as_str()] = header(description, &schema);
        // Limits that are lifted or in shadow mode have none of their own.
        let is_of_each = layer.options.headers == Headers::OpenAi && resources.len() > 1;
        headers[name.as_str()]["required"] = json!(!is_of_each);
    }
    headers
}

fn common_headers(may_retry: bool) -> Value {
    let not_stored = json!({ "type": "string", "enum": ["no-store"] });
    let mut headers = json!({ "cache-control": header("Responses are not stored.", &not_stored) });
    if may_retry {
        let seconds = json!({ "type": "integer", "minimum": 1 });
        let description = "Seconds to wait before the same request may pass.";
        headers["retry-after"] = header(description, &seconds);
    }
    headers
}

fn header(description: &str, schema: &Value) -> Value {
    json!({ "description": description, "required": true, "schema": schema })
}
