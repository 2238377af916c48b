package output

import (
	"bytes"
	"encoding/json"
	"slices"

	"github.com/moeserve/moeserve/models/grammar"
)

// Format is how a family of models writes tool calls. Formats are immutable.
type Format struct {
	// Name, which is vLLM's for the parser of the format, where it has one.
	Name string
	// Tokens that are a part of calls, as vocabularies spell them: text has to keep those of them that are special
	// tokens.
	Tokens []string
	// ShortIDs: ids of calls have to be nine letters or digits, as the family's templates demand.
	ShortIDs bool

	markers []marker
	// bare: a call needs no marker where the output begins with it.
	bare bool
	// begin is the text with which a call begins, up to the name, with the name, and behind it.
	begin, behindName string
	// quoted: the name is a JSON string's.
	quoted bool
	// name reports whether a call can have a name; nil: any.
	name func(name string) bool
	// between is the text from one call to the name of the next, end that behind the last.
	between, end string
	// arguments is the grammar of what is behind the name and behindName; nil: a JSON object, and a brace. It is nil
	// where it cannot say what a function takes.
	arguments func(f *Function) grammar.Expr
}

// marker is a text behind which there are calls.
type marker struct {
	start string
	block func(c *calls) block
}

const (
	openCall  = "<tool_call>"
	closeCall = "</tool_call>"
)

// The formats.
var (
	// Hermes is that of Hermes 2 Pro, Qwen2.5 and Qwen3: each call is a JSON object between tags.
	Hermes = &Format{
		Name: "hermes", Tokens: []string{openCall, closeCall},
		markers: []marker{{openCall, jsonBlock(closeCall, false, false)}},
		begin:   openCall + "\n" + `{"name": "`, behindName: `", "arguments":`, quoted: true,
		between: "\n" + closeCall + "\n" + openCall + "\n" + `{"name": "`, end: "\n" + closeCall,
	}
	// Mistral is that of Mixtral 8x22B and Mistral: a JSON list, or the name and then the arguments, behind a token.
	Mistral = &Format{
		Name: "mistral", Tokens: []string{callsToken, argumentsToken, callIDToken}, ShortIDs: true,
		markers: []marker{{callsToken, mistralBlock}},
		begin:   callsToken + ` [{"name": "`, behindName: `", "arguments":`, quoted: true,
		between: `, {"name": "`, end: "]",
	}
	// Phi4Mini is that of Phi-4-mini: a JSON list behind a word, or an object or a list between tokens.
	Phi4Mini = &Format{
		Name: "phi4_mini_json", Tokens: []string{phiOpen, phiClose}, markers: phiMarkers,
		begin: `functools[{"name": "`, behindName: `", "arguments":`, quoted: true,
		between: `, {"name": "`, end: "]",
	}
	// Phi4MiniTokens is the same, for templates that know the tokens: a call begins with one.
	Phi4MiniTokens = &Format{
		Name: Phi4Mini.Name, Tokens: Phi4Mini.Tokens, markers: phiMarkers,
		begin: phiOpen + `{"name": "`, behindName: `", "arguments":`, quoted: true,
		between: phiClose + phiOpen + `{"name": "`, end: phiClose,
	}
	// JSON is that of models without markers, such as Llama 3: the output is a JSON object, a list of them, or some with
	// semicolons between them.
	JSON = &Format{
		Name: "llama3_json", bare: true,
		begin: `{"name": "`, behindName: `", "parameters":`, quoted: true,
		between: `; {"name": "`,
	}
	// QwenXML is that of Qwen3-Coder: each call is a function with parameters in tags, whose values are not quoted.
	QwenXML = &Format{
		Name: "qwen3_xml", Tokens: []string{openCall, closeCall},
		markers: []marker{{openCall, xmlBlock(atFunction)}, {functionTag, xmlBlock(inFunctionName)}},
		begin:   openCall + "\n<function=", behindName: ">\n",
		between: "\n" + closeCall + "\n" + openCall + "\n<function=", end: "\n" + closeCall,
		name: xmlName, arguments: xmlArguments,
	}
	// Olmo is that of OLMo 3: calls of Python between tags.
	Olmo = &Format{
		Name: "olmo3", Tokens: []string{pythonOpen, pythonClose},
		markers: []marker{{pythonOpen, pythonBlock}},
		begin:   pythonOpen, behindName: "(",
		between: "\n", end: pythonClose,
		name: pythonName, arguments: pythonKeywords,
	}
)

var phiMarkers = []marker{
	{"functools[", jsonBlock("", true, false)},
	{phiOpen, jsonBlock(phiClose, false, false)},
}

const (
	callsToken     = "[TOOL_CALLS]"
	argumentsToken = "[ARGS]"
	callIDToken    = "[CALL_ID]"
	phiOpen        = "<|tool_call|>"
	phiClose       = "<|/tool_call|>"
	pythonOpen     = "<function_calls>"
	pythonClose    = "</function_calls>"
)

// formats are all, those with the more telling markers first.
var formats = []*Format{Mistral, QwenXML, Hermes, Phi4Mini, Olmo, JSON}

// others are further names of formats.
var others = map[string]*Format{"json": JSON, "qwen3_coder": QwenXML}

// Names of all formats, sorted.
func Names() []string {
	var names []string
	for _, f := range formats {
		names = append(names, f.Name)
	}
	for name := range others {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// Find returns the format of a name; nil if there is none.
func Find(name string) *Format {
	for _, f := range formats {
		if f.Name == name {
			return f
		}
	}
	return others[name]
}

// Detect returns the format of a model by its chat template: mentions says whether that has a text. A template with
// tools that mentions no format's marker is taken to ask for JSON. Without tools there is no format: nil.
func Detect(mentions func(text string) bool) *Format {
	switch {
	case !mentions("tools"):
		return nil
	case mentions(callsToken):
		return Mistral
	case mentions(openCall) && mentions("<function="):
		return QwenXML
	case mentions(openCall):
		return Hermes
	case mentions(pythonOpen):
		return Olmo
	case mentions("functools"):
		return Phi4Mini
	case mentions(phiOpen), mentions("<|tool|>"):
		return Phi4MiniTokens
	}
	return JSON
}

// Begin is the text with which a call begins, for a prompt that ends with it: up to the arguments of the tool of
// this name or, without a name, up to the name. The bytes from start to end are the name.
func (f *Format) Begin(name string) (text string, start, end int) {
	if name == "" {
		return f.begin, 0, 0
	}
	if f.quoted {
		name = inString(name)
	}
	start = len(f.begin)
	return f.begin + name + f.behindName, start, start + len(name)
}

// Spells reports whether a call can have the name of a function. Names of letters, digits, underscores and dashes can
// stand in all formats.
func (f *Format) Spells(name string) bool { return f.name == nil || f.name(name) }

// inString is a text as it stands in a JSON string.
func inString(text string) string {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(text); err != nil {
		panic("output: a text without a JSON form: " + err.Error())
	}
	quoted := bytes.TrimSpace(b.Bytes())
	return string(quoted[1 : len(quoted)-1])
}
