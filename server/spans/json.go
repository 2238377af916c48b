package spans

import (
	"encoding/json"
	"math"
	"strconv"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/sdk/instrumentation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
)

// These are messages of OTLP 1.x in its JSON encoding
// (https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding): names in camel case, ids in
// hexadecimal, integers of 64 bits as decimal strings, enumerations as numbers. They have the fields
// that spans of this package have; links are not among them.
type (
	exportRequest struct {
		ResourceSpans []resourceSpans `json:"resourceSpans"`
	}
	resourceSpans struct {
		Resource   resourceOf   `json:"resource"`
		ScopeSpans []scopeSpans `json:"scopeSpans"`
		SchemaURL  string       `json:"schemaUrl,omitempty"`
	}
	resourceOf struct {
		Attributes []keyValue `json:"attributes,omitempty"`
	}
	scopeSpans struct {
		Scope scope      `json:"scope"`
		Spans []jsonSpan `json:"spans"`
	}
	scope struct {
		Name    string `json:"name"`
		Version string `json:"version,omitempty"`
	}
	jsonSpan struct {
		TraceID           string     `json:"traceId"`
		SpanID            string     `json:"spanId"`
		TraceState        string     `json:"traceState,omitempty"`
		ParentSpanID      string     `json:"parentSpanId,omitempty"`
		Flags             uint32     `json:"flags"`
		Name              string     `json:"name"`
		Kind              int        `json:"kind"`
		Start             uint64     `json:"startTimeUnixNano,string"`
		End               uint64     `json:"endTimeUnixNano,string"`
		Attributes        []keyValue `json:"attributes,omitempty"`
		DroppedAttributes int        `json:"droppedAttributesCount,omitempty"`
		Events            []event    `json:"events,omitempty"`
		DroppedEvents     int        `json:"droppedEventsCount,omitempty"`
		Status            status     `json:"status"`
	}
	event struct {
		Time       uint64     `json:"timeUnixNano,string"`
		Name       string     `json:"name"`
		Attributes []keyValue `json:"attributes,omitempty"`
	}
	status struct {
		Message string `json:"message,omitempty"`
		Code    int    `json:"code,omitempty"`
	}
	keyValue struct {
		Key string `json:"key"`
		// Value has one member, which is named for its type.
		Value map[string]any `json:"value"`
	}
)

// The flags of a span above those of W3C's trace context: whether its parent is of another process, and
// that this is known.
const (
	flagHasIsRemote = 1 << 8
	flagIsRemote    = 1 << 9
)

// statusCodes are OTLP's numbers; those of the SDK are others.
var statusCodes = map[codes.Code]int{codes.Ok: 1, codes.Error: 2}

// encode is a request that exports spans of one process and one tracer.
func encode(of *resource.Resource, by instrumentation.Scope, spans []sdk.ReadOnlySpan) ([]byte, error) {
	list := make([]jsonSpan, len(spans))
	for i, s := range spans {
		context, parent := s.SpanContext(), s.Parent()
		list[i] = jsonSpan{
			TraceID: context.TraceID().String(), SpanID: context.SpanID().String(), TraceState: context.TraceState().String(),
			Flags: uint32(context.TraceFlags()) | flagHasIsRemote, Name: s.Name(), Kind: int(s.SpanKind()), // OTLP's numbers
			Start: nanoseconds(s.StartTime()), End: nanoseconds(s.EndTime()),
			Attributes: keyValues(s.Attributes()), DroppedAttributes: s.DroppedAttributes(), DroppedEvents: s.DroppedEvents(),
			Status: status{Message: s.Status().Description, Code: statusCodes[s.Status().Code]},
		}
		if parent.SpanID().IsValid() {
			list[i].ParentSpanID = parent.SpanID().String()
		}
		if parent.IsRemote() {
			list[i].Flags |= flagIsRemote
		}
		for _, e := range s.Events() {
			list[i].Events = append(list[i].Events, event{Time: nanoseconds(e.Time), Name: e.Name, Attributes: keyValues(e.Attributes)})
		}
	}
	return json.Marshal(exportRequest{ResourceSpans: []resourceSpans{{
		Resource: resourceOf{Attributes: keyValues(of.Attributes())}, SchemaURL: of.SchemaURL(),
		ScopeSpans: []scopeSpans{{Scope: scope{Name: by.Name, Version: by.Version}, Spans: list}},
	}}})
}

// nanoseconds since 1970.
func nanoseconds(t time.Time) uint64 { return uint64(max(0, t.UnixNano())) }

func keyValues(of []attribute.KeyValue) []keyValue {
	list := make([]keyValue, len(of))
	for i, kv := range of {
		list[i] = keyValue{Key: string(kv.Key), Value: anyValue(kv.Value)}
	}
	return list
}

// anyValue has the types that Record and the SDK's resources use; of others, it has the text.
func anyValue(v attribute.Value) map[string]any {
	switch v.Type() {
	case attribute.BOOL:
		return map[string]any{"boolValue": v.AsBool()}
	case attribute.INT64:
		return map[string]any{"intValue": strconv.FormatInt(v.AsInt64(), 10)}
	case attribute.FLOAT64:
		return map[string]any{"doubleValue": double(v.AsFloat64())}
	case attribute.STRINGSLICE:
		values := []map[string]any{}
		for _, s := range v.AsStringSlice() {
			values = append(values, map[string]any{"stringValue": s})
		}
		return map[string]any{"arrayValue": map[string]any{"values": values}}
	default:
		return map[string]any{"stringValue": v.String()}
	}
}

// double is a number, or protobuf's name of what JSON has no number for.
func double(f float64) any {
	switch {
	case math.IsNaN(f):
		return "NaN"
	case math.IsInf(f, 1):
		return "Infinity"
	case math.IsInf(f, -1):
		return "-Infinity"
	}
	return f
}
