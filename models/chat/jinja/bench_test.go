package jinja

import (
	"fmt"
	"strings"
	"testing"
)

// BenchmarkRender renders a conversation as a ChatML template does.
func BenchmarkRender(b *testing.B) {
	const text = `{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{{ m.role }}
{{ m.content | trim }}<|im_end|>
{% elif m.role == 'assistant' %}{% set c = m.content.split('</think>')[-1].lstrip('\n') %}<|im_start|>{{ m['role'] + '\n' + c }}<|im_end|>
{% endif %}{% endfor %}`
	for _, n := range []int{10, 1000} {
		b.Run(fmt.Sprintf("messages=%d", n), func(b *testing.B) {
			message := `{"role": "user", "content": "` + strings.Repeat("word ", 40) + `"}, {"role": "assistant", "content": "<think>\nx</think>\n\nyes"}`
			vars := variables(b, `{"messages": [`+strings.Repeat(message+", ", n/2-1)+message+`]}`)
			tmpl, err := Parse(text)
			if err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			for b.Loop() {
				if _, err := tmpl.Render(b.Context(), vars, Options{}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
