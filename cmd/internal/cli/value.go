package cli

import (
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// BPFFS is the flag of the pin directory.
func BPFFS[T ~string](into *T) Flag {
	return Flag{Name: "bpffs", Default: "/sys/fs/bpf/ebpf-cni", Help: "where maps, programs and links are pinned, on a BPF file system", Value: Directory(into)}
}

// StateDir is the flag of the state directory.
func StateDir(into *string) Flag {
	return Flag{Name: "state-dir", Default: "/run/ebpf-cni", Help: "where plugin and agent keep their state, on a tmpfs: it must end with the boot, as the pods do", Value: Directory(into)}
}

// Bool is a switch.
func Bool(into *bool) Value {
	return Value{Arg: "bool", Takes: "true or false", Set: func(s string) error {
		v, err := strconv.ParseBool(s)
		if err != nil {
			return ErrTakes
		}
		*into = v
		return nil
	}}
}

// OnOff is a switch of which other settings than these two may come.
func OnOff(into *bool) Value {
	return Value{Arg: "on|off", Takes: "on or off", Set: func(s string) error {
		if s != "on" && s != "off" {
			return ErrTakes
		}
		*into = s == "on"
		return nil
	}}
}

// Number is a decimal number of the unit that arg names, within bounds.
func Number(into *uint32, arg string, low, high uint32) Value {
	return Value{Arg: arg, Takes: fmt.Sprintf("a number from %d to %d", low, high), Set: func(s string) error {
		n, err := strconv.ParseUint(s, 10, 32)
		if err != nil || n < uint64(low) || n > uint64(high) {
			return ErrTakes
		}
		*into = uint32(n)
		return nil
	}}
}

// Duration is a time span of at least that length.
func Duration(into *time.Duration, least time.Duration) Value {
	return Value{Arg: "DURATION", Takes: fmt.Sprintf("a duration of %s or more, such as 500ms or 60s", least), Set: func(s string) error {
		d, err := time.ParseDuration(s)
		if err != nil || d < least {
			return ErrTakes
		}
		*into = d
		return nil
	}}
}

// OneOf is one of these words.
func OneOf[T ~string](into *T, words ...T) Value {
	texts := make([]string, len(words))
	for i, w := range words {
		texts[i] = string(w)
	}
	last := len(texts) - 1
	takes := strings.Join(texts[:last], ", ") + " or " + texts[last]
	return Value{Arg: strings.Join(texts, "|"), Takes: takes, Set: func(s string) error {
		if !slices.Contains(texts, s) {
			return ErrTakes
		}
		*into = T(s)
		return nil
	}}
}

// Directory is the absolute path of a directory, which need not exist.
func Directory[T ~string](into *T) Value {
	return Value{Arg: "DIR", Takes: "an absolute path of a directory", Set: func(s string) error {
		if !filepath.IsAbs(s) || strings.ContainsRune(s, 0) {
			return ErrTakes
		}
		*into = T(filepath.Clean(s))
		return nil
	}}
}
