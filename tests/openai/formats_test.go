package openai_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/anthropics/anthropic-sdk-go"
	anthropicoption "github.com/anthropics/anthropic-sdk-go/option"
	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/packages/param"
	"github.com/openai/openai-go/v3/responses"
)

func ask(prompt string) responses.ResponseNewParams {
	return responses.ResponseNewParams{
		Model: builtIn, Temperature: param.NewOpt(0.0), Store: param.NewOpt(false),
		Input: responses.ResponseNewParamsInputUnion{OfString: param.NewOpt(prompt)},
	}
}

func TestResponses(t *testing.T) {
	c := client()
	r, err := c.Responses.New(t.Context(), ask(ball))
	if err != nil {
		t.Fatal(err)
	}
	if r.OutputText() != ballIs || r.Status != "completed" || r.Usage.InputTokens != 15 || r.Usage.TotalTokens != r.Usage.InputTokens+r.Usage.OutputTokens || !strings.HasPrefix(r.ID, "resp_") {
		t.Errorf("%s", r.RawJSON())
	}

	stream := c.Responses.NewStreaming(t.Context(), ask(ball))
	var text, done, ended string
	for number := int64(0); stream.Next(); number++ {
		e := stream.Current()
		if e.SequenceNumber != number {
			t.Errorf("event %d has the number %d", number, e.SequenceNumber)
		}
		switch e := e.AsAny().(type) {
		case responses.ResponseTextDeltaEvent:
			text += e.Delta
		case responses.ResponseTextDoneEvent:
			done = e.Text
		case responses.ResponseCompletedEvent:
			ended = e.Response.OutputText()
		}
	}
	if err := stream.Err(); err != nil || text != ballIs || done != ballIs || ended != ballIs {
		t.Errorf("streamed %q, %q, %q: %v", text, done, ended, err)
	}

	// The answer goes back as it came, with a further question.
	p := ask("")
	p.Input = responses.ResponseNewParamsInputUnion{OfInputItemList: responses.ResponseInputParam{
		responses.ResponseInputItemParamOfMessage(ball, responses.EasyInputMessageRoleUser),
		responses.ResponseInputItemParamOfOutputMessage([]responses.ResponseOutputMessageContentUnionParam{
			{OfOutputText: &responses.ResponseOutputTextParam{Text: r.OutputText(), Annotations: []responses.ResponseOutputTextAnnotationUnionParam{}}},
		}, r.Output[0].ID, responses.ResponseOutputMessageStatusCompleted),
		responses.ResponseInputItemParamOfMessage("1+2=", responses.EasyInputMessageRoleUser),
	}}
	if r, err = c.Responses.New(t.Context(), p); err != nil || r.OutputText() != "3" {
		t.Errorf("second turn: %+v, %v", r, err)
	}

	p = ask(ball)
	p.PreviousResponseID = param.NewOpt("resp_1")
	var e *openai.Error
	if _, err := c.Responses.New(t.Context(), p); !errors.As(err, &e) || e.StatusCode != 400 || e.Param != "previous_response_id" {
		t.Errorf("%v", err)
	}
	p = ask(ball)
	p.MaxOutputTokens = param.NewOpt[int64](2)
	if r, err = c.Responses.New(t.Context(), p); err != nil || r.Status != "incomplete" || r.IncompleteDetails.Reason != "max_output_tokens" {
		t.Errorf("%+v, %v", r, err)
	}
}

// The model's two tokens, which biases choose, are the arguments of a call that the request names.
func TestResponsesTools(t *testing.T) {
	c := client(option.WithBaseURL(toolAddress + "/v1"))
	p := ask("Hi")
	p.Model, p.MaxOutputTokens = tools, param.NewOpt[int64](2)
	p.Tools = []responses.ToolUnionParam{{OfFunction: &responses.FunctionToolParam{Name: "weather", Parameters: map[string]any{"type": "object"}}}}
	p.ToolChoice = responses.ResponseNewParamsToolChoiceUnion{OfFunctionTool: &responses.ToolChoiceFunctionParam{Name: "weather"}}
	r, err := c.Responses.New(t.Context(), p, option.WithJSONSet("logit_bias", braces(t)), option.WithJSONSet("presence_penalty", 2))
	if err != nil {
		t.Fatal(err)
	}
	if call := r.Output[0].AsFunctionCall(); len(r.Output) != 1 || call.Name != "weather" || call.Arguments != "{}" || !strings.HasPrefix(call.CallID, "call_") {
		t.Errorf("%s", r.RawJSON())
	}
}

func messagesClient(more ...anthropicoption.RequestOption) anthropic.Client {
	return anthropic.NewClient(append([]anthropicoption.RequestOption{
		anthropicoption.WithBaseURL(address), anthropicoption.WithAPIKey(key), anthropicoption.WithMaxRetries(0), anthropicoption.WithRequestTimeout(time.Minute),
	}, more...)...)
}

func message(prompt string) anthropic.MessageNewParams {
	return anthropic.MessageNewParams{
		Model: builtIn, MaxTokens: 32, Temperature: anthropic.Float(0),
		System:   []anthropic.TextBlockParam{{Text: "Be right."}},
		Messages: []anthropic.MessageParam{anthropic.NewUserMessage(anthropic.NewTextBlock(prompt))},
	}
}

func TestMessages(t *testing.T) {
	c := messagesClient()
	m, err := c.Messages.New(t.Context(), message(ball))
	if err != nil {
		t.Fatal(err)
	}
	if len(m.Content) != 1 || m.Content[0].Text != ballIs || m.StopReason != anthropic.StopReasonEndTurn || m.Usage.InputTokens+m.Usage.CacheReadInputTokens != 15 || !strings.HasPrefix(m.ID, "msg_") {
		t.Errorf("%s", m.RawJSON())
	}
	count, err := c.Messages.CountTokens(t.Context(), anthropic.MessageCountTokensParams{
		Model: builtIn, Messages: message(ball).Messages,
	})
	if err != nil || count.InputTokens != 15 {
		t.Errorf("%+v, %v", count, err)
	}

	p := message(ball)
	p.StopSequences = []string{" ball"}
	stream := c.Messages.NewStreaming(t.Context(), p)
	var sum anthropic.Message
	for stream.Next() {
		if err := sum.Accumulate(stream.Current()); err != nil {
			t.Fatal(err)
		}
	}
	if err := stream.Err(); err != nil || len(sum.Content) != 1 || sum.Content[0].Text != "Ben has the red" || sum.StopReason != anthropic.StopReasonStopSequence || sum.StopSequence != " ball" {
		t.Errorf("%+v, %v", sum, err)
	}

	// An answer goes back as it came.
	p = message(ball)
	p.Messages = append(p.Messages, m.ToParam(), anthropic.NewUserMessage(anthropic.NewTextBlock("1+2=")))
	if m, err = c.Messages.New(t.Context(), p); err != nil || m.Content[0].Text != "3" {
		t.Errorf("%+v, %v", m, err)
	}

	var e *anthropic.Error
	p = message(ball)
	p.Temperature = anthropic.Float(-1)
	if _, err := c.Messages.New(t.Context(), p); !errors.As(err, &e) || e.StatusCode != 400 || !strings.Contains(e.RawJSON(), "invalid_request_error") || e.RequestID == "" {
		t.Errorf("%v", err)
	}
	wrong := messagesClient(anthropicoption.WithAPIKey("wrong"))
	if _, err := wrong.Messages.New(t.Context(), message(ball)); !errors.As(err, &e) || e.StatusCode != 401 || !strings.Contains(e.RawJSON(), "authentication_error") {
		t.Errorf("%v", err)
	}
}

// As TestResponsesTools: then the call's result goes back with it.
func TestMessagesTools(t *testing.T) {
	c := messagesClient(anthropicoption.WithBaseURL(toolAddress))
	p := message("Hi")
	p.Model, p.MaxTokens, p.System = tools, 2, nil
	p.Tools = []anthropic.ToolUnionParam{{OfTool: &anthropic.ToolParam{Name: "weather"}}}
	p.ToolChoice = anthropic.ToolChoiceParamOfTool("weather")
	with := []anthropicoption.RequestOption{anthropicoption.WithJSONSet("logit_bias", braces(t)), anthropicoption.WithJSONSet("presence_penalty", 2)}
	m, err := c.Messages.New(t.Context(), p, with...)
	if err != nil {
		t.Fatal(err)
	}
	stream := c.Messages.NewStreaming(t.Context(), p, with...)
	var sum anthropic.Message
	for stream.Next() {
		if err := sum.Accumulate(stream.Current()); err != nil {
			t.Fatal(err)
		}
	}
	if err := stream.Err(); err != nil {
		t.Fatal(err)
	}
	for _, m := range []*anthropic.Message{m, &sum} {
		if len(m.Content) != 1 || m.Content[0].Type != "tool_use" || m.Content[0].Name != "weather" || string(m.Content[0].Input) != "{}" {
			t.Fatalf("%+v", m)
		}
		p := message("Hi")
		p.Model, p.MaxTokens = tools, 4
		p.Messages = append(p.Messages, m.ToParam(), anthropic.NewUserMessage(anthropic.NewToolResultBlock(m.Content[0].ID, "21", false)))
		if _, err := c.Messages.New(t.Context(), p); err != nil {
			t.Error(err)
		}
	}
}
