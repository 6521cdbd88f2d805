package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestChosen(t *testing.T) {
	file := filepath.Join(t.TempDir(), "tests.txt")
	write := func(text string) {
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("# what matters\n\nServices should\n  DNS for (a|b)  \n")
	got, err := readChosen(file)
	if want := (chosen{"Services should", "DNS for (a|b)"}); err != nil || !slices.Equal(got, want) {
		t.Fatalf("got %q, %v, want %q", got, err, want)
	}
	if e := got.expression(); e != "Services should|DNS for (a|b)" {
		t.Errorf("the expression is %q", e)
	}
	if err := got.check([]string{"DNS for a", "Services should work"}); err != nil {
		t.Error(err)
	}
	if err := got.check([]string{"Services should work"}); err == nil || !strings.Contains(err.Error(), "DNS for (a|b)") {
		t.Errorf("a line matches no test: %v", err)
	}
	for _, text := range []string{"", "# nothing\n", "(\n"} {
		write(text)
		if got, err := readChosen(file); err == nil {
			t.Errorf("%q is read as %q", text, got)
		}
	}
	if _, err := readChosen(file + "?"); err == nil {
		t.Error("no file is no error")
	}
}

func TestShortSelectionIsRead(t *testing.T) {
	if all, err := readChosen("short.txt"); err != nil || len(all) < 2 {
		t.Errorf("%q, %v", all, err)
	}
	if _, err := parse([]string{"-tests=short.txt", "-publish"}); err == nil {
		t.Error("a selection may be published")
	}
	if _, err := parse([]string{"-tests=short.txt", "-focus=DNS"}); err == nil {
		t.Error("two selections at once")
	}
}
