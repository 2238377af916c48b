// Package chat renders messages to prompt text with the chat template of a checkpoint.
//
// A template is Jinja2 text from chat_template.jinja or from the chat_template of tokenizer_config.json. Package gonja
// renders it in the environment of transformers: trim_blocks and lstrip_blocks on, with raise_exception, strftime_now
// and a tojson that keeps the order of keys. Templates come with a model and are untrusted input: they cannot access
// files, and rendering time and output size are bounded.
//
// The package is not a tokenizer: the rendered text contains special tokens as text, and Encode of models/tokenizer
// (without adding special tokens) converts them to ids. For a model without a template it returns ErrNoTemplate; callers
// choose what to do then.
//
// # Example
//
//	tmpl, err := chat.Load(os.DirFS("/models/mixtral"), "mixtral")
//	if err != nil {
//		return err
//	}
//	text, err := tmpl.Render([]chat.Message{{Role: "user", Content: "Hello"}}, chat.Options{AddGenerationPrompt: true})
package chat
