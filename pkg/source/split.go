package source

import (
	"bytes"
	"encoding/json"

	"sigs.k8s.io/yaml"
)

// splitYAML reads a list in the layout that kubectl prints: top-level keys and
// the dashes of the items in the first column. Each item is then parsed by
// itself, which for thousands of Nodes takes a fraction of the memory that the
// tree of the whole document would. ok is false when the content is not laid out
// like this, or when any piece does not parse alone (an alias to another item's
// anchor, a quoted text that runs over the first column): then the whole
// document has to be parsed at once.
func splitYAML(content []byte) (l list, ok bool) {
	head, items, ok := splitItems(content)
	if !ok {
		return list{}, false
	}
	asJSON, err := yaml.YAMLToJSON(head)
	if err != nil {
		return list{}, false
	}
	if l, err = decodeJSON(asJSON); err != nil || len(l.Items) != 0 {
		return list{}, false
	}
	for _, item := range items {
		item, err := yaml.YAMLToJSON(item)
		if err != nil {
			return list{}, false
		}
		var one []json.RawMessage
		if err := json.Unmarshal(item, &one); err != nil || len(one) != 1 {
			return list{}, false
		}
		l.Items = append(l.Items, one[0])
	}
	return l, true
}

// splitItems cuts the document into the items, each with its dash, and the rest.
func splitItems(content []byte) (head []byte, items [][]byte, ok bool) {
	const (
		before = iota
		inside
		after
	)
	state, begin, offset := before, 0, 0
	for line := range bytes.Lines(content) {
		at := offset
		offset += len(line)
		trimmed := bytes.TrimRight(line, " \t\r\n")
		dash := len(trimmed) > 1 && trimmed[0] == '-' && trimmed[1] == ' '
		switch {
		case state == before && bytes.Equal(trimmed, []byte("items:")):
			state, begin = inside, -1
			continue
		case state == inside && dash:
			if begin >= 0 {
				items = append(items, content[begin:at])
			}
			begin = at
			continue
		case state == inside && topLevelKey(trimmed):
			if begin >= 0 {
				items = append(items, content[begin:at])
			}
			state = after
		case state == inside && indented(trimmed) && begin >= 0:
			continue
		case state != inside && (topLevelKey(trimmed) || indented(trimmed)):
		default:
			return nil, nil, false
		}
		head = append(head, line...)
		if line[len(line)-1] != '\n' {
			head = append(head, '\n')
		}
	}
	if state == inside && begin >= 0 {
		items = append(items, content[begin:])
	}
	return head, items, len(items) > 0
}

// topLevelKey reports whether a line begins a plain key in the first column.
// "items" a second time is not one: the parser has to complain about that.
func topLevelKey(line []byte) bool {
	name, _, found := bytes.Cut(line, []byte(":"))
	if !found || len(name) == 0 || bytes.Equal(name, []byte("items")) {
		return false
	}
	for _, c := range name {
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') {
			return false
		}
	}
	return true
}

// indented reports whether a line belongs to what began above it.
func indented(line []byte) bool {
	return len(line) > 0 && line[0] == ' '
}
