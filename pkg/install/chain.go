package install

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
)

// Entry is the configuration of one plugin of a list: a JSON object with a type.
type Entry = json.RawMessage

// Others is the part of the list that other programs have written: it stays when the agent changes its own part.
type Others struct {
	// Plugins stand behind ours, in their order.
	Plugins []Entry
	// Fields are those of the list itself that the agent does not write, such as disableCheck.
	Fields map[string]json.RawMessage
}

// refused are plugins that --cni-chain can't chain, with the reason and the remedy.
var refused = map[string]string{
	Plugin:      "is this network's own plugin, which the agent puts first; leave it out",
	Portmap:     "is chained by --portmap on; leave it out",
	"bandwidth": "shapes by a queueing discipline that redirected packets bypass; leave it out",
}

// ParseChain parses a JSON list of plugin configurations, as they stand in "plugins" of a network configuration list.
func ParseChain(content []byte) ([]Entry, error) {
	var chain []Entry
	if err := json.Unmarshal(content, &chain); err != nil {
		return nil, fmt.Errorf("it is not a JSON list: %w", err)
	}
	for i, e := range chain {
		kind := TypeOf(e)
		if kind == "" {
			return nil, fmt.Errorf("plugin %d is not an object with the file name of a plugin as its type", i+1)
		}
		if why := refused[kind]; why != "" {
			return nil, fmt.Errorf("plugin %d, %s, %s", i+1, kind, why)
		}
	}
	return chain, nil
}

// TypeOf returns a plugin's type, the file name of its executable; empty: the entry is not valid.
func TypeOf(e Entry) string {
	var has struct{ Type string }
	if json.Unmarshal(e, &has) != nil || has.Type == "." || has.Type == ".." || strings.ContainsAny(has.Type, "/\x00\n") {
		return ""
	}
	return has.Type
}

// typesOf returns the types of plugins.
func typesOf(all []Entry) (types []string) {
	for _, e := range all {
		types = append(types, TypeOf(e))
	}
	return types
}

// ReadOthers returns what other programs have written into the list in dir, or into the one that SetAside has set aside. Of a list
// that is invalid, or in which our plugin is missing, that is nothing. Plugins before ours are left out.
func ReadOthers(dir string) (Others, error) {
	content, err := os.ReadFile(filepath.Join(dir, Conflist))
	if errors.Is(err, fs.ErrNotExist) {
		content, err = os.ReadFile(aside(dir))
	}
	if errors.Is(err, fs.ErrNotExist) {
		return Others{}, nil
	}
	if err != nil {
		return Others{}, fmt.Errorf("read network configuration list: %w", err)
	}
	return parseOthers(content), nil
}

func parseOthers(content []byte) Others {
	var fields map[string]json.RawMessage
	var plugins []Entry
	if json.Unmarshal(content, &fields) != nil || json.Unmarshal(fields["plugins"], &plugins) != nil {
		return Others{}
	}
	first := slices.Index(typesOf(plugins), Plugin)
	if first < 0 {
		return Others{}
	}
	for _, own := range []string{"cniVersion", "cniVersions", "name", "plugins"} {
		delete(fields, own)
	}
	return Others{Plugins: behind(plugins[first], plugins[first+1:]), Fields: fields}
}

// behind returns the plugins that the agent has not written: for each that it has, our own entry names the type.
func behind(own Entry, plugins []Entry) []Entry {
	var wrote struct {
		Portmap bool
		Chained []string
	}
	_ = json.Unmarshal(own, &wrote) // what is wrong in it says nothing of plugins behind it
	if wrote.Portmap {
		wrote.Chained = append(wrote.Chained, Portmap)
	}
	return slices.DeleteFunc(slices.Clone(plugins), func(e Entry) bool {
		kind := TypeOf(e)
		i := slices.Index(wrote.Chained, kind)
		if i >= 0 {
			wrote.Chained = slices.Delete(wrote.Chained, i, i+1)
		}
		return i >= 0 || kind == "" || kind == Plugin
	})
}

// SetAside takes the list away from runtimes, and keeps it for ReadOthers until the next one is written. It reports whether there was one.
func SetAside(dir string) (bool, error) {
	err := os.Rename(filepath.Join(dir, Conflist), aside(dir))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// aside is the name of a list that was set aside: runtimes read *.conf, *.conflist and *.json.
func aside(dir string) string { return filepath.Join(dir, "."+Conflist+".aside") }

// sameJSON reports whether two texts have the same content, whatever the order of their fields and their white space.
func sameJSON(a, b []byte) bool {
	x, errX := decode(a)
	y, errY := decode(b)
	return errX == nil && errY == nil && reflect.DeepEqual(x, y)
}

func decode(content []byte) (value any, err error) {
	d := json.NewDecoder(bytes.NewReader(content))
	d.UseNumber()
	err = d.Decode(&value)
	return value, err
}
