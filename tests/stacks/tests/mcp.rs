//! An MCP server of rmcp. The name of the tool is in the body, so the limit for each tool is a
//! `Limiter` where tools are called. The layer limits all requests of a client.

use std::io;
use std::net::SocketAddr;

use axum::Router;
use axum::extract::ConnectInfo;
use axum::http::request::Parts;
use rmcp::handler::server::tool::ToolCallContext;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, ServerCapabilities,
    ServerConfig,
};
use rmcp::service::RequestContext;
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use rmcp::{ErrorData, RoleServer, ServerHandler, tool, tool_handler, tool_router};
use tokio::net::TcpListener;
use tower_fixed_window::{FixedWindowLayer, Limiter, Quota};

#[derive(Clone)]
struct Tools {
    calls: Limiter,
}

#[tool_router]
impl Tools {
    #[tool(description = "Searches the web")]
    fn search(&self) -> String {
        "found".into()
    }

    #[tool(description = "Sends a mail")]
    fn mail(&self) -> String {
        "sent".into()
    }
}

#[tool_handler]
impl ServerHandler for Tools {
    fn get_info(&self) -> ServerConfig {
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let parts: Option<&Parts> = context.extensions.get();
        let peer = parts.and_then(|parts| parts.extensions.get::<ConnectInfo<SocketAddr>>());
        let Some(ConnectInfo(peer)) = peer else {
            return Err(ErrorData::internal_error("no address of the client", None));
        };
        // Each client has a count for each tool.
        let decision = self.calls.check((peer.ip(), &*request.name)).await;
        let decision = decision.map_err(|_| ErrorData::internal_error("no answer", None))?;
        if let Err(refused) = decision.into_result() {
            // A refusal is a result of the tool, so that the model reads it.
            return Ok(CallToolResult::error(vec![ContentBlock::text(refused.to_string())]).into());
        }
        Self::tool_router().call(ToolCallContext::new(self, request, context)).await
    }
}

async fn serve(listener: TcpListener) -> io::Result<()> {
    let tools = Tools { calls: Limiter::new(Quota::per_hour(1).from_first_request()) };
    let limit = FixedWindowLayer::new(Quota::per_hour(4).from_first_request());
    let config = StreamableHttpServerConfig::default()
        .with_legacy_session_mode(false)
        .with_json_response(true);
    let service: StreamableHttpService<_, LocalSessionManager> =
        StreamableHttpService::new(move || Ok(tools.clone()), Default::default(), config);
    let app = Router::new().nest_service("/mcp", service).layer(limit);
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await
}

#[tokio::test]
async fn each_tool_has_a_limit_and_all_requests_have_another() {
    use tokio::net::TcpStream;
    use tower_fixed_window_stacks::{Answer, send};

    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let addr = listener.local_addr().expect("bound");
    tokio::spawn(serve(listener));

    let call = async |tool: &str| -> Answer {
        let stream = TcpStream::connect(addr).await.expect("the server listens");
        let headers = "content-type: application/json\r\n\
            accept: application/json, text/event-stream\r\nmcp-protocol-version: 2025-06-18\r\n";
        let body = format!(
            r#"{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"name":"{tool}","arguments":{{}}}}}}"#
        );
        send(stream, "POST /mcp", headers, &body).await
    };
    for tool in ["search", "mail"] {
        let passed = call(tool).await;
        assert!(passed.body.contains(r#""isError":false"#), "{passed:?}");
        let refused = call(tool).await;
        assert_eq!(refused.status, 200);
        assert!(refused.body.contains(r#""isError":true"#), "{refused:?}");
        assert!(refused.body.contains("rate limit exceeded: 1 of 1 used, retry in "));
    }
    // The fifth request.
    let refused = call("search").await;
    assert_eq!(refused.status, 429, "{refused:?}");
    assert_eq!(refused.header("x-ratelimit-limit"), Some("4"));
    assert_eq!(refused.header("x-ratelimit-remaining"), Some("0"));
    assert!(refused.header("retry-after").is_some());
}
