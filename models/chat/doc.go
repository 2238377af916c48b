// Package chat renders messages to prompt text with the chat template of a checkpoint.
//
// A template is Jinja2 text from chat_template.jinja or from the chat_template of tokenizer_config.json. Package
// [github.com/moeserve/moeserve/models/chat/jinja] renders it as transformers does, byte for byte. Templates come with a
// model and are untrusted input: they cannot access files, and a rendering is bounded in time, output and memory. So are
// messages: the prompt says which of its bytes they wrote, so that a control token in a message can stay plain text.
//
// A template that walks content parts gets them as they came; for all others their texts are joined. The role
// "developer" is kept for templates that know it.
//
// The package is not a tokenizer: the rendered text contains special tokens as text, and Encode of models/tokenizer
// (without adding special tokens) converts them to ids. For a model without a template it returns ErrNoTemplate; callers
// choose what to do then.
//
// # Example
//
//	tmpl, err := chat.Load(untrusted.Dir("/models/mixtral"), "mixtral")
//	if err != nil {
//		return err
//	}
//	prompt, err := tmpl.Render(ctx, []chat.Message{{Role: "user", Content: "Hello"}}, chat.Options{AddGenerationPrompt: true})
package chat
