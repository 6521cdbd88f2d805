package agent

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
	"github.com/ebpf-cni/ebpf-cni/pkg/source"
)

// A reconciler that is busy finds the newest Nodes when it is done, and no queue of all states since.
func TestLatest(t *testing.T) {
	began := time.Now()
	nodes := func(count int) source.Update {
		return source.Update{Nodes: make([]plan.Node, count), Changed: began.Add(time.Duration(count) * time.Second)}
	}
	fault := func(text string) source.Update { return source.Update{Err: errors.New(text), Changed: began} }
	for name, c := range map[string]struct {
		said []source.Update
		want []string
	}{
		"nothing":              {nil, nil},
		"one":                  {[]source.Update{nodes(3)}, []string{"3 Nodes, 3s"}},
		"a crowd":              {[]source.Update{nodes(1), nodes(2), nodes(3)}, []string{"3 Nodes, 1s"}},
		"a fault after Nodes":  {[]source.Update{nodes(1), nodes(2), fault("first"), fault("last")}, []string{"2 Nodes, 1s", "last"}},
		"Nodes after a fault":  {[]source.Update{fault("over"), nodes(2)}, []string{"2 Nodes, 2s"}},
		"Nodes, a fault, more": {[]source.Update{nodes(1), fault("over"), nodes(2)}, []string{"2 Nodes, 1s"}},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLatest()
			for _, u := range c.said {
				l.put(u)
			}
			var got []string
			for _, u := range l.take() {
				if u.Err != nil {
					got = append(got, u.Err.Error())
					continue
				}
				got = append(got, fmt.Sprintf("%d Nodes, %s", len(u.Nodes), u.Changed.Sub(began)))
			}
			if fmt.Sprint(got) != fmt.Sprint(c.want) {
				t.Errorf("got %q, want %q", got, c.want)
			}
			if left := l.take(); left != nil {
				t.Errorf("taken twice: %v", left)
			}
		})
	}
}
