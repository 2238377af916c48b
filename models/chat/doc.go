// Package chat renders the chat template of a checkpoint: messages in, the prompt text that the model was trained on
// out.
//
// A template is Jinja2 text from chat_template.jinja or from the chat_template of tokenizer_config.json, rendered with
// gonja in the environment that transformers gives its templates: trim_blocks and lstrip_blocks on, raise_exception,
// strftime_now and an order-keeping tojson. Templates come with a model and are foreign input: they reach no file,
// and the time they take and the text they write are bounded.
//
// It is not a tokenizer: special tokens stand in the rendered text as they are written, and Encode of models/tokenizer
// (without adding special tokens) turns them into ids. It does not decide what to do for a model without a template:
// that is ErrNoTemplate.
//
// # Example
//
//	tmpl, err := chat.Load(os.DirFS("/models/mixtral"), "mixtral")
//	if err != nil {
//		return err
//	}
//	text, err := tmpl.Render([]chat.Message{{Role: "user", Content: "Hello"}}, chat.Options{AddGenerationPrompt: true})
package chat
