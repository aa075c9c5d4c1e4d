// AttentionView: the picture comes drawn, in the colours of the page's theme (attention_tiles_svg.py).
figures.attention_tiles = {
  mount(el) {
    return { draw(picture) { setHtml(el, picture.svg); } };
  },
};
