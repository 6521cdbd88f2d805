package cli

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/pflag"
)

// Flag is one flag of a command.
type Flag struct {
	Name string
	// Short is its letter; empty: it has none.
	Short string
	// Default is the text of the default, of which the help speaks by itself; empty: Set is not called.
	Default string
	// Help says what the value does, and what the default is where Default is empty.
	Help string
	Value
	// EmptyCounts: an empty environment variable is a value, not an absence.
	EmptyCounts bool
}

// Value is what a flag takes and where it goes.
type Value struct {
	// Arg stands for the value in the help and says its unit; "bool" makes the flag a switch.
	Arg string
	// Takes completes "--name "value": takes ...".
	Takes string
	// Set keeps a value, or says what is wrong with it beside what the flag takes: ErrTakes says no more than that.
	Set func(value string) error
}

// ErrTakes is the error of a value that is not what its flag takes.
var ErrTakes = errors.New("bad value")

// Variable is the environment variable of one of the agent's flags.
func Variable(name string) string {
	return "EBPF_AGENT_" + strings.ToUpper(strings.ReplaceAll(name, "-", "_"))
}

// Define adds flags to a set, where the help keeps their order. variable names the environment variable of a flag; nil: they have
// none.
func Define(set *pflag.FlagSet, variable func(name string) string, flags ...Flag) {
	set.SortFlags = false
	for _, f := range flags {
		t := &text{Flag: f, value: f.Default}
		if variable != nil {
			t.variable = variable(f.Name)
		}
		defined := set.VarPF(t, f.Name, f.Short, inLines(f.Help))
		if f.Arg == "bool" {
			defined.NoOptDefVal = "true"
		}
	}
}

// inLines breaks a text into lines of at most 76 characters. A template that does so, as cobra takes one, would make the linker
// keep every exported method of the program: a fifth of its size.
func inLines(help string) string {
	var out strings.Builder
	column := 0
	for i, word := range strings.Fields(help) {
		switch {
		case i > 0 && column+1+len(word) > 76:
			out.WriteByte('\n')
			column = 0
		case i > 0:
			out.WriteByte(' ')
			column++
		}
		out.WriteString(word)
		column += len(word)
	}
	return out.String()
}

// text is a flag's value before it is checked; all are checked together, in the
// order of the help, whether they come from the command line or the environment.
type text struct {
	Flag
	value, variable string
}

func (t *text) String() string     { return t.value }
func (t *text) Set(s string) error { t.value = s; return nil }
func (t *text) Type() string       { return t.Arg }

// read checks every flag: the command line wins, then the environment.
func read(set *pflag.FlagSet, lookup func(string) (string, bool)) (err error) {
	set.VisitAll(func(f *pflag.Flag) {
		if t, ours := f.Value.(*text); ours && err == nil {
			err = t.read(f.Changed, lookup)
		}
	})
	return err
}

func (t *text) read(given bool, lookup func(string) (string, bool)) error {
	value, from := t.value, ""
	if env, ok := lookup(t.variable); !given && t.variable != "" && ok && (env != "" || t.EmptyCounts) {
		value, given, from = env, true, " (from $"+t.variable+")"
	}
	if !given && value == "" {
		return nil
	}
	err := t.Flag.Set(value)
	switch {
	case errors.Is(err, ErrTakes):
		return fmt.Errorf("--%s %q%s: takes %s", t.Name, value, from, t.Takes)
	case err != nil:
		return fmt.Errorf("--%s %q%s: %w; takes %s", t.Name, value, from, err, t.Takes)
	}
	return nil
}
