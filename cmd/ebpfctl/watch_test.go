package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/cmd/internal/cli"
)

// watch runs a watching call in this goroutine, which owns the namespaces;
// each chunk that is written is given to next, which ends the call by false.
func watch(t *testing.T, terminal bool, next func(n int, chunk string) bool, args ...string) result {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	n := 0
	var stderr bytes.Buffer
	out := writerFunc(func(p []byte) {
		if !next(n, string(p)) {
			stop()
		}
		n++
	})
	status := run(ctx, env{stdout: out, stderr: &stderr, args: args, lookup: func(string) (string, bool) { return "", false }, terminal: terminal})
	return result{status: status, stderr: stderr.String()}
}

type writerFunc func(p []byte)

func (f writerFunc) Write(p []byte) (int, error) {
	f(p)
	return len(p), nil
}

func TestWatchJSON(t *testing.T) {
	h := newHost(t)
	for _, args := range [][]string{{"endpoints"}, {"all"}} {
		var documents []string
		got := watch(t, false, func(n int, chunk string) bool {
			documents = append(documents, chunk)
			h.addEndpoint(t, fmt.Sprintf("10.244.1.%d", 100+n), 50)
			return n < 2
		}, h.args(append([]string{"-o", "json", "dump", "--watch", "--interval", "1ms"}, args...)...)...)
		if got.status != cli.Fine || got.stderr != "" || len(documents) != 3 {
			t.Fatalf("%v: %+v, %d documents", args, got, len(documents))
		}
		for _, d := range documents {
			if strings.Count(d, "\n") != 1 || !strings.HasSuffix(d, "\n") || !json.Valid([]byte(d)) {
				t.Errorf("%v: want one document in one line, got %q", args, d)
			}
		}
		if args[0] == "endpoints" && (documents[0] == documents[1] || !strings.Contains(documents[1], "10.244.1.100")) {
			t.Errorf("an added endpoint is not seen: %q", documents)
		}
	}
}

func TestWatchYAMLSeparatesDocuments(t *testing.T) {
	h := newHost(t)
	var all strings.Builder
	watch(t, false, func(n int, chunk string) bool {
		all.WriteString(chunk)
		return n < 1
	}, h.args("-o", "yaml", "dump", "endpoints", "-w", "--interval", "1ms")...)
	documents := strings.Split(all.String(), "---\n")
	if len(documents) != 2 || documents[0] == "" || documents[0] != documents[1] {
		t.Errorf("documents: %q", documents)
	}
}

func TestWatchTable(t *testing.T) {
	h := newHost(t)
	for _, terminal := range []bool{false, true} {
		var chunks []string
		watch(t, terminal, func(n int, chunk string) bool {
			chunks = append(chunks, chunk)
			return n < 1
		}, h.args("dump", "endpoints", "-w", "--interval", "1ms")...)
		if len(chunks) != 2 || strings.HasPrefix(chunks[1], clearScreen) != terminal {
			t.Errorf("terminal %v: %q", terminal, chunks)
		}
		if !terminal && chunks[1] != "\n"+chunks[0] {
			t.Errorf("into a pipe, tables are separated by an empty line: %q", chunks)
		}
	}
}
