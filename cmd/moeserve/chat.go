package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/models/chat"
	"github.com/moeserve/moeserve/node"
	"github.com/moeserve/moeserve/node/checkpoint"
	"github.com/moeserve/moeserve/planner"
)

// chatOptions are the flags of chat alone.
type chatOptions struct {
	system  string
	verbose bool
}

func newChat(s *streams) *cobra.Command {
	var o chatOptions
	cmd := &cobra.Command{
		Use:   "chat [MODEL]",
		Short: "Talk with a model in the terminal",
		Long: `Talk with a model in the terminal: each line is a message, and the model sees the
conversation so far. MODEL is the directory of an instruct checkpoint, one with a
chat template; without it, the small model inside this binary answers.

/help lists the commands of the conversation. Ctrl-C stops a completion, and twice at
the prompt ends the conversation, as Ctrl-D does. The oldest messages are forgotten
when the model's context is full. Where standard input is not a terminal, its lines
are the messages.`,
		Example: `  moeserve chat
  moeserve chat /models/mixtral-8x7b --system 'Answer in one sentence.' -v`,
		Args:              oneModel,
		ValidArgsFunction: completeModelArgument,
		RunE: func(cmd *cobra.Command, args []string) error {
			set, err := modelSettings(cmd, args)
			if err != nil {
				return err
			}
			return runChat(cmd.Context(), s, set, &o)
		},
	}
	addSettings(cmd.Flags(), configs.For("chat"))
	cmd.Flags().StringVar(&o.system, "system", "", "system message, a `TEXT` in front of the conversation")
	cmd.Flags().BoolVarP(&o.verbose, "verbose", "v", false, "print time to first token and tokens/s after each completion")
	return cmd
}

// chatPrompt is the length of prompt, in tokens, that a policy is made for.
const chatPrompt = 128

func runChat(ctx context.Context, s *streams, set *settings, o *chatOptions) (err error) {
	if name := set.Model.Name; set.Model.LoadFormat == configs.LoadDummy || configs.PresetRepository(name) != "" {
		if name == "" {
			name = checkpoint.BuiltIn
		}
		return usagef("chat needs a trained model, and %s has no weights; download one (%s) and give its directory, or leave the model out for the built-in one",
			name, checkpoint.Download(repositoryOr(name, "ORG/NAME")))
	}
	n, err := open(ctx, s, node.Options{
		Settings: set.Settings, Explicit: set.given, Log: set.logger(s.err), Template: checkpoint.TemplateNeeded, ExpectCPU: set.Model.Name == "",
		Workload: planner.Workload{PromptTokens: chatPrompt, NewTokens: set.Generate.MaxTokens, Requests: 1},
	}, false)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	set.Settings = n.Info().Settings
	c := &conversation{s: s, n: n, set: set, verbose: o.verbose, system: o.system}
	var lines lineReader = newPipedLines(s.in)
	if _, terminal := s.err.(lineDisplay); terminal && interactive(s.in) {
		lines = newEditedLines(s.in.(*os.File), s.err)
		c.note("%s on %s; /help lists commands, Ctrl-D ends", n.Info().Name, deviceName(n))
	}
	return c.run(ctx, lines)
}

func deviceName(n *node.Node) string {
	if !n.Info().Facts.Real {
		return "the CPU"
	}
	return n.Info().Device
}

func repositoryOr(preset, otherwise string) string {
	if r := configs.PresetRepository(preset); r != "" {
		return r
	}
	return otherwise
}

// conversation is a chat's state between messages.
type conversation struct {
	s       *streams
	n       *node.Node
	set     *settings
	verbose bool
	// system is the system message; empty: none. messages come in turn from user and
	// assistant, and end with the assistant's.
	system   string
	messages []chat.Message
}

// note prints a line that is not the model's.
func (c *conversation) note(format string, args ...any) {
	fmt.Fprintf(c.s.err, format+"\n", args...)
}

// run answers line by line, until the lines end or /exit.
func (c *conversation) run(ctx context.Context, lines lineReader) error {
	for {
		line, err := lines.readLine(ctx)
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		}
		switch text := strings.TrimSpace(line); {
		case text == "":
		case strings.HasPrefix(text, "//"):
			err = c.answer(ctx, text[1:])
		case strings.HasPrefix(text, "/"):
			if ended := c.command(text); ended {
				return nil
			}
		default:
			err = c.answer(ctx, text)
		}
		if err != nil {
			return err
		}
	}
}

// chatCommand is a command of a conversation; do returns true to end it.
type chatCommand struct {
	name, argument, help string
	do                   func(c *conversation, argument string) (end bool)
}

// chatCommands lists them. It is a function for /help prints them.
func chatCommands() []chatCommand {
	return []chatCommand{
		{"help", "", "list these commands", (*conversation).help},
		{"clear", "", "forget the conversation", func(c *conversation, _ string) bool {
			c.messages = nil
			return false
		}},
		{"system", "[TEXT]", "set the system message, or remove it", func(c *conversation, text string) bool {
			c.system = text
			return false
		}},
		{"set", "[NAME VALUE]", "list the parameters, or set one", (*conversation).parameter},
		{"exit", "", "end the conversation (Ctrl-D)", func(*conversation, string) bool { return true }},
	}
}

// command carries out a line that begins with "/", and says whether that ends the
// conversation.
func (c *conversation) command(line string) (end bool) {
	name, argument, _ := strings.Cut(line[1:], " ")
	same := map[string]string{"quit": "exit", "bye": "exit", "?": "help", "reset": "clear"}
	var names []string
	for _, k := range chatCommands() {
		if k.name == name || k.name == same[name] {
			return k.do(c, strings.TrimSpace(argument))
		}
		names = append(names, "/"+k.name)
	}
	c.note("there is no command /%s%s", name, suggestion("/"+name, names, "/help lists the commands, and // sends a message that begins with /"))
	return false
}

func (c *conversation) help(string) bool {
	for _, k := range chatCommands() {
		c.note("  %-20s %s", strings.TrimSpace("/"+k.name+" "+k.argument), k.help)
	}
	c.note("  %-20s %s", "Ctrl-C", "stop a completion; twice at the prompt: end the conversation")
	return false
}

// parameters are the settings that hold for each completion anew.
var parameters = []string{"max-tokens", "temperature", "seed", "ignore-eos"}

func (c *conversation) parameter(text string) bool {
	name, value, _ := strings.Cut(text, " ")
	name = strings.TrimLeft(name, "-")
	switch {
	case text == "":
		values := c.set.Values()
		for _, p := range parameters {
			c.note("  %-20s %v", p, values[p])
		}
	case !slices.Contains(parameters, name):
		c.note("there is no parameter %q%s", name, suggestion(name, parameters, "/set lists them"))
	default:
		k, _ := configs.Find(name)
		v, err := parse(k, strings.TrimSpace(value))
		if err != nil {
			c.note("%s is %q: %v", name, value, err)
			return false
		}
		changed := c.set.Settings
		if err := changed.Put(map[string]any{name: v}); err != nil {
			c.note("%s", oneLine(err))
			return false
		}
		c.set.Settings = changed
	}
	return false
}

// answer has the model answer a message. What is wrong with the message alone is noted; an
// error is the end of the conversation.
func (c *conversation) answer(ctx context.Context, text string) error {
	messages := append(slices.Clone(c.messages), chat.Message{Role: "user", Content: text})
	ids, messages, err := c.fit(messages)
	if err != nil {
		c.note("%s", oneLine(err))
		return nil
	}
	if forgotten := len(c.messages) + 1 - len(messages); forgotten > 0 {
		c.note("(the context is full: the oldest %d messages are forgotten)", forgotten)
	}
	turn, stop := context.WithCancel(ctx)
	defer stop()
	restore := c.s.interrupts.during(stop)
	a, err := generate(turn, c.n, c.set, &prompt{ids: ids, encoded: true}, c.s.out)
	restore()
	switch {
	case err == nil:
	case ctx.Err() == nil && turn.Err() != nil && a != nil:
		c.note("(stopped)")
	case errors.Is(err, engine.ErrPromptTooLong) || errors.Is(err, engine.ErrBadRequest):
		c.note("%s", oneLine(err))
		return nil
	default:
		return err
	}
	if len(a.ids) > 0 {
		c.messages = append(messages, chat.Message{Role: "assistant", Content: a.text})
	}
	if c.verbose && err == nil {
		c.note("[TTFT %s, %d prompt tokens; %d completion tokens (%s), decode %s]", seconds(a.prefill.Seconds()), len(a.prompt), len(a.ids), a.finish, tokensPerSecond(rate(len(a.ids)-1, a.decode)))
	}
	return nil
}

// fit turns messages into the ids of a prompt, without the oldest ones where the context
// would not hold a completion, too.
func (c *conversation) fit(messages []chat.Message) ([]int32, []chat.Message, error) {
	limit := c.n.Info().Limits.MaxModelLen
	room := max(1, min(c.set.Generate.MaxTokens, limit/4))
	for {
		all := messages
		if c.system != "" {
			all = append([]chat.Message{{Role: "system", Content: c.system}}, messages...)
		}
		ids, err := c.n.Text().EncodeChat(all)
		if err != nil || len(messages) == 1 || len(ids)+room <= limit {
			return ids, messages, err
		}
		messages = messages[2:] // the user's, and the assistant's to it
	}
}
