"""An HTML page as it is read."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """Texts, tags and addresses of a page; unclosed tags are an error."""

    def __init__(self, path):
        super().__init__()
        self.open, self.seen, self.texts, self.addresses = [], [], [], []
        self.source = path.read_text()
        self.feed(self.source)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "link", "img", "polyline", "line", "circle"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("polyline", "line", "circle"):
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
