package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/pflag"
)

// flag is one flag of the command line.
type flag struct {
	name string
	// arg is the placeholder in the help; empty for a switch.
	arg   string
	value string // the default
	help  string
	// takes completes "--name "value": takes ...".
	takes string
	// emptyCounts: an empty environment variable is a value, not an absence.
	emptyCounts bool
	// set checks a value and keeps it. given is false for the default.
	set func(o *options, value string, given bool) error
}

// values are the flags of one command with what was given on its command line.
type values struct {
	flags []flag
	raw   map[string]*string
}

func newValues(flags []flag) values {
	v := values{flags: flags, raw: map[string]*string{}}
	for _, f := range flags {
		value := f.value
		v.raw[f.name] = &value
	}
	return v
}

// text is a flag's value before it is checked; all are checked together, in the
// order of the help, whether they come from the command line or the environment.
type text struct {
	value *string
	arg   string
}

func (t text) String() string     { return *t.value }
func (t text) Set(s string) error { *t.value = s; return nil }
func (t text) Type() string       { return t.arg }

func (v values) define(set *pflag.FlagSet) {
	set.SortFlags = false
	for _, f := range v.flags {
		defined := set.VarPF(text{v.raw[f.name], f.arg}, f.name, "", f.help)
		if f.arg == "" {
			defined.NoOptDefVal = "true"
		}
	}
}

// variable is the environment variable of a flag.
func variable(name string) string {
	return "EBPF_AGENT_" + strings.ToUpper(strings.ReplaceAll(name, "-", "_"))
}

// read checks every flag: the command line wins, then the environment.
func (v values) read(set *pflag.FlagSet, lookup func(string) (string, bool), o *options) error {
	for _, f := range v.flags {
		value, given, from := *v.raw[f.name], set.Changed(f.name), ""
		if env, ok := lookup(variable(f.name)); !given && ok && (env != "" || f.emptyCounts) {
			value, given, from = env, true, " (from $"+variable(f.name)+")"
		}
		if err := f.set(o, value, given); err != nil {
			return fmt.Errorf("--%s %q%s: %w", f.name, value, from, f.explain(err))
		}
	}
	return nil
}

// errTakes says only that the value is not what the flag takes.
var errTakes = errors.New("bad value")

// explain adds what the flag takes to what is wrong with its value.
func (f flag) explain(err error) error {
	if errors.Is(err, errTakes) {
		return fmt.Errorf("takes %s", f.takes)
	}
	return fmt.Errorf("%w; takes %s", err, f.takes)
}
