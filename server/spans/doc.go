// Package spans exports requests as spans of OpenTelemetry, by OTLP over HTTP. It is server.Tracer for
// --otlp-traces-endpoint, and alone knows OpenTelemetry's SDK. The SDK
// samples spans and makes batches of them; a sender posts them.
//
// A request that uses the model is one span, with the name and the attributes that vLLM gives it. It is
// a child of the span in the request's traceparent header, if there is one, and then it is sampled as
// that is. OTEL_* variables of the SDK apply: the service's name and attributes, the sampler, the sizes
// of batches; and of the exporter's, OTEL_EXPORTER_OTLP_ and OTEL_EXPORTER_OTLP_TRACES_ with HEADERS,
// COMPRESSION, TIMEOUT, CERTIFICATE, CLIENT_CERTIFICATE and CLIENT_KEY. Spans are sent as JSON.
//
// # What it is not
//
// It has nothing of steps, kernels and copies: that is --trace's timeline. It has no prompt and no
// completion.
//
// # Invariants
//
//   - Record never waits: spans are sent in batches, and dropped where the collector does not keep up.
//   - Close waits for what has not been sent, closeTimeout at most.
package spans
