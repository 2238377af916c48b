// Package output splits what a model writes in a chat into reasoning, content and tool calls, while the model
// writes it.
//
// How a model marks its calls depends on its family: Hermes and Qwen put a JSON object between <tool_call> tags,
// Mistral a JSON list behind [TOOL_CALLS], Phi one behind "functools", Qwen3-Coder writes XML, OLMo 3 Python. A Format
// is one of these, by the name that vLLM has for its parser. Detect finds that of a model by its chat template.
//
// # What it is not
//
// It knows neither tokens nor HTTP: text comes in, Deltas come out. It does not check arguments against the schema of
// their tool, nor that they are valid JSON: they are what the model wrote, as with OpenAI's API. It makes no model call
// a tool; a Format only has the text with which a call begins (Format.Begin), for a prompt that ends with it.
//
// # Invariants
//
//   - The deltas of a text, those of one kind joined, do not depend on how the text is cut into pieces: all state
//     advances by bytes.
//   - A text without a call comes out as content, byte for byte. Of a text with calls, all that is no part of one
//     does, but for the white space around them.
//   - A call begins when its name, one of the request's tools, and the first byte of its arguments are there. What
//     looked like a call until then, and is none, is content. A call that has begun stays one, even if its arguments
//     end early: their bytes have been delivered.
//   - What may still become a marker or a call is held back, and nothing else but white space.
//   - Time and memory are linear in the text, whatever it holds: no byte is read more than a constant number of times.
//
// # Example
//
//	p := output.New(output.Options{Format: output.Hermes, Tools: tools})
//	for text := range texts {
//		send(p.Push(text))
//	}
//	send(p.End())
package output
